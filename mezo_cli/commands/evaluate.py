"""`mezo eval`: evaluate a run's checkpoint, or any Hugging Face folder, on a split."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mezo_cli import data
from mezo_cli.commands.open_run import Opened, is_shared, open_run
from mezo_cli.commands.run_of_ranks import in_turn
from mezo_cli.config.overrides import quote
from mezo_cli.config.schema import Config
from mezo_cli.console import (
    TextTable,
    console_logging,
    make_console,
    make_error_console,
    make_table,
    print_line,
    progress_bar,
)
from mezo_cli.distributed.join import joined
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import UserError, did_you_mean
from mezo_cli.runs import checkpoints, sweep_record
from mezo_cli.system import import_torch

if TYPE_CHECKING:  # it imports torch
    from mezo_cli.training.evaluation import Evaluation

log = logging.getLogger("mezo")

SPLITS = ("test", "dev", "train")


def evaluate(
    path: Path,
    overrides: Sequence[str],
    checkpoint: str | None,
    split: str,
    config_dir: str | None,
    base: Path | None,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Evaluate a run, a checkpoint folder of a run, a trajectory folder, or a plain Hugging Face folder; print scores.

    Args:
        path: the folder.
        overrides: settings for a plain folder, at least the task and the data; for a trajectory folder, where its data
            are. A run has its own config.
        checkpoint: of a run: `best` (if None), `last` or a step number.
        split: one of `SPLITS`.
        config_dir: the user's config folder.
        base: of a trajectory folder: the folder of its base model.
        as_json: print one JSON document instead of the table; the log goes to standard error.
        quiet: print no log lines and no progress.

    Raises:
        UserError: for a folder or a split that does not exist, and when the loss is not finite.
    """
    run_dir = _find_run_dir(path, overrides, checkpoint, split, base)
    import_torch()
    console = make_error_console() if as_json else make_console()
    with joined() as ranks, console_logging(console, quiet):
        source = _open(path, run_dir, overrides, checkpoint, config_dir, base, ranks)
        result = _evaluate_split(source, split, ranks, Console(quiet=True) if quiet else console)
    name, rows = source.name, sum(result.predicted.values())
    if not result.is_finite:
        raise UserError(f"{name}: its loss on {split} is not finite: the weights have diverged or are damaged")
    if as_json:
        which = {
            "run": str(run_dir or path),
            "checkpoint": None if source.opened is None else source.opened.checkpoint,
            "split": split,
        }
        document = {**which, "rows": rows, **result.scores(), "predicted": result.predicted}
        print_line(json.dumps(document, indent=2))
        return
    print_line(f"{name}, {split}: {rows} rows")
    console.print(_table(result.scores(), result.predicted, console.width))


@dataclass(frozen=True)
class _Source:
    """What is evaluated: its config, its name for messages, and the run; None for a plain model folder."""

    config: Config
    name: str
    opened: Opened | None


def _find_run_dir(
    path: Path, overrides: Sequence[str], checkpoint: str | None, split: str, base: Path | None
) -> Path | None:
    """Return the run directory or the trajectory folder that `path` belongs to; None for a plain model folder.

    Raises:
        UserError: for options that do not go together, or not with such a folder.
    """
    if split not in SPLITS:
        raise UserError(f"--split {split}: allowed are {', '.join(SPLITS)}{did_you_mean(split, SPLITS)}")
    shared = is_shared(path)
    if not shared and not path.is_dir():
        raise UserError(f"{path}: no such folder")
    is_run = (path / "config.yaml").is_file() and not (path / "config.json").is_file()
    run_dir = path if is_run or shared else checkpoints.find_run(path)
    if run_dir is None and sweep_record.exists(path):
        raise UserError(f"{path} is a sweep: name one of its runs (`mezo runs` lists the runs)")
    if run_dir is None and not any(text.startswith("task=") for text in overrides):
        raise UserError(f"{path} is no run: give task=... and data=... to evaluate a plain model folder")
    if run_dir is None and base is not None:
        raise UserError(f"--base {base} needs a trajectory folder; {path} is a plain model folder")
    if run_dir is not None and overrides and not shared:
        raise UserError(f"'{overrides[0]}': only a plain model folder takes settings; a run has its own")
    if checkpoint is not None and not is_run and not shared:
        what = f"the checkpoint '{path.name}' of {run_dir}" if run_dir is not None else "a plain model folder"
        raise UserError(f"--checkpoint {checkpoint}: {path} is {what} already; the option needs a run directory")
    return run_dir


def _open(
    path: Path,
    run_dir: Path | None,
    overrides: Sequence[str],
    checkpoint: str | None,
    config_dir: str | None,
    base: Path | None,
    ranks: Ranks | None,
) -> _Source:
    """Open what `evaluate` was given."""
    if run_dir is None:
        from mezo_cli.config.compose import build_config

        return _Source(build_config([*overrides, f"model.path={quote(path.resolve())}"], config_dir), str(path), None)
    with in_turn(ranks):
        opened = open_run(path, checkpoint, base)
    if opened.shared is not None:
        from mezo_cli.sharing.shared_run import with_own_data

        opened = replace(opened, config=with_own_data(opened.config, overrides))
    return _Source(opened.config, opened.name, opened)


def _evaluate_split(source: _Source, split: str, ranks: Ranks | None, console: Console) -> "Evaluation":
    """Load the weights and the rows of a split, and evaluate.

    Raises:
        UserError: when there is no such split, and for whatever cannot be loaded.
    """
    from mezo_cli.training.agreement import check_same_weights
    from mezo_cli.training.device_errors import explain_device_errors
    from mezo_cli.training.evaluation import evaluate as evaluate_rows
    from mezo_cli.training.load import load_session

    config, opened = source.config, source.opened
    splits = data.load_splits(config)
    if ranks is not None:
        ranks.start(config)
        ranks.check_same("set of rows", f"rows of sha256 {splits.fingerprint[:16]}")
    rows = getattr(splits, split)
    if rows is None:
        raise UserError(f"{source.name}: there is no {split} split (data={config.data.name})")
    if opened is not None and opened.run.info().get("data_fingerprint") not in (None, splits.fingerprint):
        log.warning("warning: the data have changed since the run")
    session = load_session(config) if opened is None else opened.load()
    if ranks is not None:
        check_same_weights(session, ranks)
    size = config.eval_batch_size
    advice = f"a lower eval_batch_size (now {size})"
    if opened is not None:  # its settings are fixed
        advice = f"again when the device has more free memory (the run's eval_batch_size is {size})"
    with (
        explain_device_errors(f"{source.name}: evaluating {split}", advice),
        progress_bar(console, f"{split} rows", len(rows)) as report,
    ):
        return evaluate_rows(session, session.encoder.encode_all(rows), report=report)


def _table(scores: Mapping[str, float], predicted: Mapping[str, int], width: int) -> TextTable:
    """Return a table of one row, or of two columns where the terminal is too narrow for that."""
    cells = {name: f"{value:.4f}" for name, value in scores.items()}
    cells |= {f"predicted {label}": str(number) for label, number in predicted.items()}
    if sum(2 + max(len(name), len(value)) for name, value in cells.items()) <= width:
        table = make_table("", *cells)
        table.add_row("", *cells.values())
        return table
    table = make_table("", "")
    for name, value in cells.items():
        table.add_row(name, value)
    return table
