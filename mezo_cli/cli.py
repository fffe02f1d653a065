"""The doors: Typer commands. They parse, print and exit; nothing heavy is imported before a command runs."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mezo_cli.completion import complete
from mezo_cli.errors import RunFailed, UserError, listed
from mezo_cli.signals import interrupt

app = typer.Typer(
    name="mezo",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models with forward passes only (MeZO): train, sweep, evaluate, resume, replay.",
)
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, or that of the click inside newer Typers


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    return complete(ctx, incomplete)


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
    if cfg is not None and cfg not in ("job", "hydra", "all"):
        raise UserError(f"--cfg {cfg}: allowed are job, hydra, all")
    if cfg is not None and multirun:
        raise UserError("--cfg prints the config of one job: leave -m out")
    from mezo_cli import launch

    if cfg is not None:
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
def compare(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="DIR", help="Where to look, else outputs.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's whole table, your rows below its own.")] = False,
    objectives: Annotated[bool, typer.Option("--objectives", help="Objectives and losses, run beside run.")] = False,
    seeds: Annotated[bool, typer.Option("--seeds", help="Also what was picked for each data seed.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write a .md, .csv or .json file instead.")] = None,
) -> None:
    """Mean and std over seeds, the best dev score picked for each, beside the paper's numbers."""
    views = [name for name, on in (("paper", paper), ("objectives", objectives), ("seeds", seeds)) if on]
    if len(views) > 1:
        raise UserError(f"--{views[0]} and --{views[1]} are two views: ask for one at a time")
    from mezo_cli import compare as comparing

    comparing.compare(folders or [], views[0] if views else "groups", out)


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


def main(run: Callable[..., Any] = app) -> None:
    """Run the command line. Exit status: 0 done, 2 the user's mistake, 1 a failed run, 130 interrupted."""
    # Before torch is loaded: threads that wait by spinning take the cores from each other when a machine is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # And large blocks in huge pages: activations are allocated and freed at every layer (docs/step.md).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    signal.signal(signal.SIGTERM, interrupt)
    try:
        status = run(args=sys.argv[1:] or ["--help"], prog_name="mezo", standalone_mode=False)
    except UserError as error:
        _fail(str(error), 2)
    except RunFailed as error:
        _fail(str(error), 1)
    except UsageError as error:
        _fail(_usage(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains once more
        sys.exit(1)
    except OSError as error:  # outside a run: a file that may not be read, a folder that may not be written
        _fail(str(error), 2)
    if status == 130:  # newer Typers answer Ctrl-C themselves
        _fail("interrupted", 130)
    sys.exit(status or 0)


def _usage(error: Any) -> str:
    """Return what is wrong with the command line; Typer says it, but not which commands there are."""
    commands = getattr(getattr(error.ctx, "command", None), "commands", {})
    message = str(error.format_message())
    return f"{message} Commands: {listed(commands)}" if commands and "command" in message else message


def _fail(text: str, status: int) -> NoReturn:
    sys.stdout.flush()
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(status)
