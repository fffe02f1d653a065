"""`mezo eval`: evaluate a run's checkpoint, or any Hugging Face folder, on a split."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mezo_cli.commands.open_run import Opened, open_run
from mezo_cli.config.schema import Config, Splits, data_dir
from mezo_cli.config.stored import REWARD, check_given_again, split_own_code, with_own_code
from mezo_cli.console import (
    TextTable,
    console_logging,
    log,
    make_console,
    make_error_console,
    make_table,
    print_line,
    progress_bar,
)
from mezo_cli.distributed.ranks import in_turn, joined
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.process.signals import import_torch
from mezo_cli.rewards.spec import describe_change
from mezo_cli.runs import checkpoints
from mezo_cli.runs.run import is_sweep

if TYPE_CHECKING:  # it imports torch
    from mezo_cli.objectives.scoring import Evaluation

SPLITS = ("test", "dev", "train")
DATA = "data.dir="


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
    """Evaluate a run, a checkpoint of one, or a plain Hugging Face folder; print scores."""
    if split not in SPLITS:
        raise UserError(f"--split {split}: allowed are {join(SPLITS)}{did_you_mean(split, SPLITS)}")
    is_plain = _is_plain_folder(path, overrides, checkpoint, base)
    import_torch()
    console = make_error_console() if as_json else make_console()
    with joined() as ranks, console_logging(console, quiet):
        opened = None
        if is_plain:
            from mezo_cli.config.compose import build_config  # imports Hydra
            from mezo_cli.config.overrides import quote

            config, name = build_config([*overrides, f"model.path={quote(path.resolve())}"], config_dir), str(path)
        else:
            with in_turn(ranks):
                opened = open_with_own(path, checkpoint, base, overrides)
            config, name = opened.config, opened.name
        result = _evaluate_split(config, name, opened, split, Console(quiet=True) if quiet else console)
    rows = len(result.values)
    if not result.is_finite:
        why = f"the weights have diverged or are damaged{config.model.wider_range}"
        raise UserError(f"{name}: its loss on {split} is not finite: {why}")
    if as_json:
        run, at = (path, None) if opened is None else (opened.run.path, opened.checkpoint)
        document = {"run": str(run), "checkpoint": at, "split": split, "rows": rows}
        print_line(json.dumps({**document, **result.scores(), **result.details}, indent=2))
        return
    print_line(f"{name}, {split}: {rows} rows")
    console.print(_table(result.scores(), result.details.get("predicted", {}), console.width))


def _is_plain_folder(path: Path, overrides: Sequence[str], checkpoint: str | None, base: Path | None) -> bool:
    """Return whether a folder is a model that belongs to no run; what it needs or cannot have is checked then."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    is_run = (path / "config.yaml").is_file() and not (path / "config.json").is_file()
    if not is_run and is_sweep(path):
        raise UserError(f"{path} is a sweep: name one of its runs (`mezo runs` lists the runs)")
    if is_run or checkpoints.find_run(path) is not None:
        return False
    if not any(text.startswith("task=") for text in overrides):
        raise UserError(f"{path} is no run: give task=... and data=... to evaluate a plain model folder")
    for option, value in (("--base", base), ("--checkpoint", checkpoint)):
        if value is not None:
            raise UserError(f"{option} {value}: {path} is a plain model folder; the option needs a run")
    return True


def open_with_own(path: Path, checkpoint: str | None, base: Path | None, overrides: Sequence[str]) -> Opened:
    """Open a run (see `open_run`) with the data and the code that the user has given for it."""
    overrides, user_code = split_own_code(overrides)
    for text in overrides:
        if not text.startswith(DATA):
            allowed = f"a run has its own, but for a function as {REWARD}, and {DATA}DIR"
            raise UserError(f"'{text}': only a plain model folder takes settings, by mezo eval; {allowed}")
    opened = open_run(path, checkpoint, base)
    config, info = with_own_code(opened.config, user_code), opened.run.info()
    if config.data.name != "files" and overrides:
        raise UserError(f"'{overrides[-1]}': the run has data={config.data.name}, which does not read it")
    for text in overrides:
        data: Any = config.data  # of files
        config = config.replace(data=data.replace(dir=text.removeprefix(DATA)))
    if config.data.name == "files" and data_dir(config.data) is None:
        raise UserError(f"{opened.name}: its data were files, which it does not say the place of: give {DATA}DIR")
    check_given_again(f"{opened.name} was trained", info, config)
    if change := describe_change(config, info):
        log.warning("warning: %s", change)
    return replace(opened, config=config)


def _evaluate_split(config: Config, name: str, opened: Opened | None, split: str, console: Console) -> "Evaluation":
    from mezo_cli.process.memory import explain_device_errors
    from mezo_cli.session.opening import prepare

    def check(splits: Splits) -> None:
        if getattr(splits, split) is None:
            raise UserError(f"{name}: there is no {split} split (data={config.data.name})")
        if opened is not None and opened.run.info().get("data_fingerprint") not in (None, splits.fingerprint):
            log.warning("warning: the data have changed since the run")

    load, advice = None, f"a lower eval_batch_size (now {config.eval_batch_size})"
    if opened is not None:  # its settings are fixed
        load = opened.load
        advice = f"again when the device has more free memory (the run's eval_batch_size is {config.eval_batch_size})"
    with prepare(config, load, check, splits=[split]) as prepared:
        session, rows = prepared.session, prepared.rows[split]
        explained = explain_device_errors(f"{name}: evaluating {split}", advice)
        with explained, progress_bar(console, f"{split} rows", len(rows)) as report:
            return session.objective.evaluate(rows, report, session.ranks)


def _table(scores: Mapping[str, float], predicted: Mapping[str, int], width: int) -> TextTable:
    cells = {name: f"{value:.4f}" for name, value in scores.items()}
    cells |= {f"predicted {label}": str(number) for label, number in predicted.items()}
    fits = sum(2 + max(len(name), len(value)) for name, value in cells.items()) <= width
    table = make_table("", *cells) if fits else make_table("", "")
    for row in [("", *cells.values())] if fits else cells.items():
        table.add_row(*row)
    return table
