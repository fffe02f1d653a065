"""The doors: Typer commands. They parse, print and exit; nothing heavy is imported before a command runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mezo_cli.errors import RunFailed, UserError

app = typer.Typer(
    name="mezo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models with forward passes only (MeZO): train, sweep, evaluate, resume, replay.",
)


def _complete(incomplete: str) -> list[str]:
    """Complete `task=`, `model=` and the like from the files in conf/, and the plain keys. Imports nothing heavy."""
    here = Path(__file__).resolve().parent
    conf = here / "conf" if (here / "conf").is_dir() else here.parent / "conf"
    roots, words = [conf], sys.argv
    if "--config-dir" in words[:-1]:
        roots.append(Path(words[words.index("--config-dir") + 1]).expanduser())
    group, equals, _ = incomplete.partition("=")
    if equals:
        names = {str(p.relative_to(r / group).with_suffix("")) for r in roots for p in (r / group).rglob("*.yaml")}
        return sorted(f"{group}={name}" for name in names if f"{group}={name}".startswith(incomplete))
    groups = {f"{p.name}=" for root in roots for p in root.iterdir() if p.is_dir()}
    keys = {
        "steps=",
        "seed=",
        "batch_size=",
        "eval_every=",
        "optimizer.lr=",
        "optimizer.eps=",
        "data.dir=",
        "data.shots=",
    }
    return sorted(word for word in groups | keys if word.startswith(incomplete))


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings, e.g. task=rte optimizer.lr=1e-5", autocompletion=_complete
    ),
]
ConfigDir = Annotated[str | None, typer.Option("--config-dir", help="A folder with your own task/, model/... YAMLs.")]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="best, last, or a step number (replayed).")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


@app.command()
def train(
    overrides: Overrides = None,
    multirun: Annotated[bool, typer.Option("-m", "--multirun", help="Sweep over comma-separated values.")] = False,
    cfg: Annotated[str | None, typer.Option("--cfg", help="Print the composed config (job) and stop.")] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Run one training, or a sweep with -m."""
    from mezo_cli import launch

    if cfg is not None:
        if cfg not in ("job", "hydra", "all"):
            raise UserError(f"--cfg {cfg}: allowed are job, hydra, all")
        launch.show(overrides or [], config_dir, cfg)
    elif multirun:
        raise typer.Exit(launch.sweep(overrides or [], config_dir))
    else:
        launch.single(overrides or [], config_dir)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, a checkpoint in it, or a Hugging Face folder.")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = "best",
    split: Annotated[str, typer.Option("--split", help="test, dev or train.")] = "test",
    config_dir: ConfigDir = None,
) -> None:
    """Evaluate a run's checkpoint on a split; or any Hugging Face folder, with task=... data=... given."""
    from mezo_cli import launch

    launch.evaluate(run, overrides or [], checkpoint, split, config_dir)


@app.command()
def resume(run: RunDir) -> None:
    """Go on after a stop or a crash, to the same result as if it had never stopped."""
    from mezo_cli import launch

    launch.resume(run)


@app.command()
def replay(
    run: RunDir,
    step: Annotated[int, typer.Option("--step", help="The step whose weights to rebuild.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder for the Hugging Face model.")],
) -> None:
    """Rebuild the weights of a step from the base model and the trajectory."""
    from mezo_cli import launch

    launch.replay(run, step, out)


@app.command()
def runs(folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look.")] = Path("outputs")) -> None:
    """List the runs under a folder."""
    from mezo_cli import show

    show.runs(folder)


@app.command()
def data(
    overrides: Overrides = None,
    export: Annotated[Path | None, typer.Option("--export", help="Write the few-shot files into this folder.")] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Show what the model sees: class balance, lengths, prompts; or write the few-shot splits."""
    from mezo_cli import show

    show.data(overrides or [], export, config_dir)


@app.command()
def env() -> None:
    """Print versions, device and cores, for a bug report."""
    from mezo_cli import show

    show.env()


def _fail(text: str, status: int) -> NoReturn:
    sys.stdout.flush()
    print(f"error: {text}", file=sys.stderr)
    sys.exit(status)


def main(run: Callable[..., Any] = app) -> None:
    """Run the command line. Exit status: 0 done, 2 the user's mistake, 1 a failed run, 130 interrupted."""
    try:
        run()
    except UserError as error:
        _fail(str(error), 2)
    except RunFailed as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
