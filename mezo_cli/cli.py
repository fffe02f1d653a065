"""The command line: Typer parses it, a module of `commands` does the work, the exit status says how it ended.

Nothing heavy is imported before a command runs.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mezo_cli.commands.completion import complete
from mezo_cli.distributed.launch import check_command, silent_followers
from mezo_cli.errors import (
    FULL,
    RunFailed,
    RunStopped,
    UserError,
    is_interruption,
    join,
    one_line,
    shorten,
    without_credentials,
)
from mezo_cli.process.environment import (
    IN_SWEEP,
    discard_output,
    logs_without_credentials,
    prepare_standard_streams,
    set_library_defaults,
)
from mezo_cli.process.signals import termination_as_keyboard_interrupt
from mezo_cli.process.versions import package_version

app = typer.Typer(
    name="mezo",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models with forward passes only (MeZO): train, sweep, evaluate, resume, replay.",
)
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, or that of the click inside newer Typers


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings, e.g. task=rte optimizer.lr=1e-5", autocompletion=complete),
]
ConfigDir = Annotated[str | None, typer.Option("--config-dir", help="A folder with your own task/, model/... YAMLs.")]
From = Annotated[
    Path | None, typer.Option("--from", metavar="RUN", help="Begin with a run's settings, or those of a config.yaml.")
]
Checkpoint = Annotated[
    str | None, typer.Option("--checkpoint", help="best (default), last, or a step number (replayed).")
]
Base = Annotated[
    Path | None, typer.Option("--base", metavar="DIR", help="The folder of the base model, in place of the run's.")
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs", min=1, metavar="N", help="Of a sweep: how many jobs run at a time here, each with its share."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
QuietTraining = Annotated[
    bool, typer.Option("-q", "--quiet", help="Print the directory, warnings and errors only: no bar, no table.")
]
ANY_RUN = "A run, or a checkpoint folder in it."
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


@app.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Take the options that are given before a command."""
    if version:
        typer.echo(f"mezo {package_version()}")
        raise typer.Exit
    check_command(ctx.invoked_subcommand)


@app.command(rich_help_panel="Train")
def train(
    overrides: Overrides = None,
    multirun: Annotated[bool, typer.Option("-m", "--multirun", help="Sweep over comma-separated values.")] = False,
    cfg: Annotated[str | None, typer.Option("--cfg", metavar="job", help="Print the composed config and stop.")] = None,
    config_dir: ConfigDir = None,
    jobs: Jobs = 1,
    prints: Annotated[bool, typer.Option("--print", help="With -m: print a command per job, and run none.")] = False,
    quiet: QuietTraining = False,
    source: From = None,
    as_json: AsJson = False,
) -> None:
    """Run one training, or a sweep with -m.

    \b
    task=sst2            what is learned: a file of conf/task/ or --config-dir
    objective=mlm        how: mlm, cls (encoders), lm, choice, generate (decoders)
    model=roberta-large  from what; model.path= takes a hub id or a folder
    data=hub             or demo, or files with data.dir=DIR; data.shots=16
    optimizer=mezo       the method, with optimizer.lr= and optimizer.eps=
    peft=none            all weights, or lora, prefix, head, bias, scales
    steps=100000         how long
    batch_size=64        rows of a step
    eval_every=10000     steps between evaluations on dev
    seed=42              of z, batches and rows

    \b
    mezo train experiment=demo
    mezo train task=sst2 model=roberta-base data.shots=16 steps=2000
    mezo train -m experiment=demo seed=1,2,3 optimizer.lr=1e-4,1e-3
    mezo train --from outputs/RUN optimizer.lr=1e-3

    \b
    All keys: docs/reference/config.md; as composed: --cfg job.
    Tab completes keys and choices after mezo --install-completion.
    """
    if cfg not in (None, "job"):
        raise UserError(f"--cfg {cfg}: allowed is job")
    if cfg is not None and multirun:
        raise UserError("--cfg prints the config of one job: leave -m out")
    for option, is_set in {"print": prints, "jobs": jobs != 1}.items():
        if is_set and not multirun:
            raise UserError(f"--{option} needs a sweep: add -m")
    if as_json and (prints or cfg):
        raise UserError("--json describes what has run: leave --print and --cfg out")
    words = _words(source, overrides, config_dir)
    if multirun:
        check_command("train -m")
        from mezo_cli.commands import sweep

        raise typer.Exit(sweep.sweep(words, config_dir, jobs, prints, quiet, as_json))
    if cfg is not None:
        from mezo_cli.config import compose, stored

        print(stored.to_yaml(compose.build_config(words, config_dir), whole=True), end="")
    else:
        from mezo_cli.commands import train

        train.train(words, config_dir, quiet, as_json)


@app.command("eval", rich_help_panel="Use a run's weights")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, a checkpoint in it, or a Hugging Face folder.")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    split: Annotated[str, typer.Option("--split", help="test, dev or train.")] = "test",
    config_dir: ConfigDir = None,
    base: Base = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the scores only, no log and no bar.")] = False,
) -> None:
    """Evaluate a run's checkpoint on a split; or any Hugging Face folder, with task=... data=... given."""
    from mezo_cli.commands import evaluate

    evaluate.evaluate(run, overrides or [], checkpoint, split, config_dir, base, as_json, quiet)


@app.command(rich_help_panel="Train")
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run or sweep directory.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="When it ends: steps, patience, max_seconds, at_limit, stop_on_divergence; "
            "engine.python, objective.reward=FILE.py:function; of a sweep the launcher.",
        ),
    ] = None,
    quiet: QuietTraining = False,
    new_reward: Annotated[
        bool, typer.Option("--new-reward", help="Go on with another function as objective.reward.")
    ] = False,
    config_dir: ConfigDir = None,
    jobs: Jobs = 1,
) -> None:
    """Continue after a stop or a crash; the result is bitwise identical to a run that never stopped."""
    from mezo_cli.commands import resume

    raise typer.Exit(resume.resume(run, overrides or [], quiet, new_reward, config_dir, jobs))


@app.command(rich_help_panel="Train")
def tune(
    overrides: Overrides = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="KEY=LOW:HIGH",
            help="A key to search over; may be repeated. Default: optimizer.lr, .eps, from a tenth to ten times.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", min=1, help="How many trainings, those done before included.")
    ] = 20,
    config_dir: ConfigDir = None,
    quiet: QuietTraining = False,
    as_json: AsJson = False,
) -> None:
    """Search for learning rate, eps and other numbers with Optuna: one training per trial."""
    from mezo_cli.commands import tune

    raise typer.Exit(tune.tune(overrides or [], config_dir, ranges or [], trials, quiet, as_json))


@app.command(rich_help_panel="Use a run's weights")
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run.")],
    step: Annotated[int, typer.Option("--step", help="The step whose weights to rebuild.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder for the Hugging Face model.")],
    base: Base = None,
) -> None:
    """Rebuild the weights of a step from the base model and the trajectory."""
    from mezo_cli.commands import replay

    replay.replay(run, step, out, base)


@app.command(rich_help_panel="Use a run's weights")
def verify(
    run: RunDir,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="data.dir=DIR, objective.reward=FILE.py:function.")
    ] = None,
    base: Base = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the picked and the last weights from the trajectory, and compare weights and scores with the run's."""
    from mezo_cli.commands import verify

    raise typer.Exit(verify.verify(run, overrides or [], base, as_json))


@app.command(rich_help_panel="Use a run's weights")
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=ANY_RUN)],
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="A text; for a task of several columns COLUMN=TEXT for each. May be repeated."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A .jsonl, .csv, .tsv or .parquet file with the task's columns.")
    ] = None,
    checkpoint: Checkpoint = None,
    base: Base = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write a .jsonl or .csv file instead.")] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the labels only: no log and no bar.")] = False,
) -> None:
    """Label texts of your own, with the probability of each label; without --text and --file, standard input."""
    from mezo_cli.commands import predict

    predict.predict(run, text or [], file, checkpoint, base, as_json, out, quiet)


@app.command(rich_help_panel="Share and store")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=ANY_RUN)],
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
    checkpoint: Checkpoint = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write a LoRA alone, as a folder of peft, instead of merging it.")
    ] = False,
    trajectory: Annotated[
        bool, typer.Option("--trajectory", help="Write the few KB from which others rebuild the weights of every step.")
    ] = False,
    base: Base = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="USER/NAME", help="Also upload it to this repository of the hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
) -> None:
    """Share a run: a Hugging Face folder with a model card, or with --trajectory what rebuilds its weights."""
    from mezo_cli.commands import export

    export.export(run, out, checkpoint, adapter, trajectory, base, push, private)


@app.command(rich_help_panel="Share and store")
def prune(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run, or a folder of runs.")]) -> None:
    """Remove full checkpoints of finished runs, after a replay that was bitwise identical to them."""
    from mezo_cli.commands import prune

    prune.prune(folder)


@app.command(rich_help_panel="Look at runs")
def runs(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="Where to look, else outputs.")] = None,
    sort: Annotated[str | None, typer.Option("--sort", help="A column (test: best first), or a setting's key.")] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the directories only.")] = False,
) -> None:
    """List the runs under a folder, with every setting in which they differ."""
    from mezo_cli.commands import runs

    runs.runs(folder, sort, as_json, quiet)


@app.command(rich_help_panel="Look at runs")
def compare(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="DIR", help="Where to look, else outputs.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's whole table, your rows below its own.")] = False,
    table: Annotated[str | None, typer.Option("--table", help="The paper's: roberta (as --paper), or opt.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write a .csv file instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Mean and std over seeds, the best dev score picked for each, with the paper's numbers."""
    from mezo_cli.commands import compare

    compare.compare(folders or [], table or ("roberta" if paper else None), out, as_json)


@app.command(rich_help_panel="Look at runs")
def show(run: RunDir, as_json: AsJson = False) -> None:
    """Show one run: what it was, its result, how it went, its settings."""
    from mezo_cli.commands import show

    show.show(run, as_json)


@app.command(rich_help_panel="Look at runs")
def report(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="DIR", help="Where to look, else outputs.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The page to write: FILE.html.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="One figure for a paper: FILE.svg|pdf|png.")] = None,
) -> None:
    """Write one self-contained page about runs, or a figure for a paper."""
    from mezo_cli.commands import report

    report.report(folders or [], out, figure)


@app.command(rich_help_panel="Before training")
def data(
    overrides: Overrides = None,
    export: Annotated[Path | None, typer.Option("--export", help="Write the few-shot files into this folder.")] = None,
    words: Annotated[bool, typer.Option("--words", help="Propose label words, by the labels of train.")] = False,
    config_dir: ConfigDir = None,
    source: From = None,
) -> None:
    """Show what the model sees: class balance, lengths, prompts; write the few-shot splits; or propose label words."""
    from mezo_cli.commands import data

    data.data(_words(source, overrides, config_dir), export, words, config_dir)


@app.command(rich_help_panel="Before training")
def doctor(
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option("--seconds", help="The time for the checks; loading is not in it.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON document.")] = False,
    config_dir: ConfigDir = None,
    source: From = None,
) -> None:
    """Check a setup before training: label words, data, signal, cost. Writes nothing."""
    if not seconds > 0 or seconds == float("inf"):
        raise UserError(f"--seconds {seconds:g}: give a number above 0")
    from mezo_cli.commands import doctor

    doctor.doctor(_words(source, overrides, config_dir), seconds, as_json, config_dir)


@app.command(rich_help_panel="Help")
def env() -> None:
    """Print versions, device and cores, for a bug report."""
    from mezo_cli.commands import env

    env.env()


def _words(source: Path | None, overrides: list[str] | None, config_dir: str | None) -> list[str]:
    """Return the overrides of a command line, after those that `--from` means; a task of one's own is complete."""
    words = overrides or []
    if source is not None:
        from mezo_cli.commands.from_run import with_settings_of

        words = with_settings_of(source, words, config_dir)
    if "task=own" in words:
        from mezo_cli.commands.own_task import check_own_task

        check_own_task(words, config_dir)
    return words


def main(run: Callable[..., Any] = app) -> None:
    """Run the command line. What the exit status says: docs/reference/commands.md."""
    prepare_standard_streams()
    set_library_defaults()
    with silent_followers(), logs_without_credentials(), termination_as_keyboard_interrupt():
        try:
            status = run(args=sys.argv[1:] or ["--help"], prog_name="mezo", standalone_mode=False)
            sys.stdout.flush()
        except UserError as error:
            _fail(str(error), 2)
        except RunFailed as error:
            _fail(str(error), 1)
        except RunStopped as stop:
            _fail(str(stop), 130, label="")
        except UsageError as error:
            _fail(_usage(error), 2)
        except (KeyboardInterrupt, typer.Abort):
            _fail("interrupted", 130)
        except (MemoryError, SystemError) as error:  # of an import: what a run lacks is said by explain_device_errors
            _fail(f"not enough memory: {one_line(error)}", 2)
        except BrokenPipeError:
            discard_output(sys.stdout)  # or the flush at exit complains once more
            sys.exit(1)
        except OSError as error:  # outside a run: a file that may not be read, a folder that may not be written
            if error.errno in FULL and error.filename is None:
                discard_output(sys.stdout)
                _fail(f"standard output: cannot be written: {error.strerror}", 1)
            _fail(str(error), 1 if error.errno in FULL else 2)
        if status == 130:  # newer Typers answer Ctrl-C themselves
            _fail("interrupted", 130)
        sys.exit(status or 0)


def _usage(error: Any) -> str:
    """Return what is wrong with the command line: the commands where one is unknown, KEY=VALUE for --KEY."""
    from mezo_cli.config.explain import GROUPS, OTHER_NAMES, key_owners, known_as

    commands = getattr(getattr(error.ctx, "command", None), "commands", {})
    message = str(error.format_message())
    option = str(getattr(error, "option_name", None) or "")
    name = option.lstrip("-").replace("-", "_")
    keys = [key for key in (*GROUPS, *key_owners()) if key == name or key.endswith(f".{name}")]
    if "such option" in message and (keys or known_as(name)):
        keys = [name] if name in keys else keys
        what = " or ".join(f"{key}=VALUE" for key in keys) or known_as(name)
        return f"{message} Settings are given without dashes: {what}"
    if "extra argument" in message and (answer := OTHER_NAMES.get(f"{error.ctx.info_name} RUN TEXT")):
        return f"{message}: {answer}"
    return f"{message} Commands: {join(commands)}" if commands and "command" in message else message


def _fail(text: str, status: int, label: str = "error: ") -> NoReturn:
    from mezo_cli.console import print_line

    if is_interruption(sys.exception()):
        text, status, label = "interrupted", 130, "error: "
    if status == 130 and IN_SWEEP in os.environ:  # the process of the sweep says it
        sys.exit(status)
    try:
        sys.stdout.flush()
        print_line(f"{label}{shorten(without_credentials(' '.join(text.split())))}", sys.stderr)
    except OSError:  # the terminal is gone; the flush at exit would end with another status
        discard_output(sys.stdout)
        discard_output(sys.stderr)
    sys.exit(status)
