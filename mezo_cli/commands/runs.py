"""`mezo runs`: list the runs under a folder. Of each run only what the list shows is read."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from mezo_cli.commands.open_run import folders_or_outputs
from mezo_cli.config.explain import key_owners
from mezo_cli.config.registry import OBJECTIVES
from mezo_cli.config.schema import MISSING, Config
from mezo_cli.config.stored import read_settings
from mezo_cli.config.validation import defaults
from mezo_cli.console import make_console, print_line, printable
from mezo_cli.errors import UserError, did_you_mean, join, one_line
from mezo_cli.optim import OPTIMIZERS
from mezo_cli.report.settings import (
    WITHOUT_EFFECT,
    differing_keys,
    fill,
    flatten_values,
    format_score,
    format_value,
    matches,
    short_name,
    telling_keys,
)
from mezo_cli.runs import Run, find_runs, trajectory
from mezo_cli.runs.scores import MARK, NOTE, picked_start

COLUMNS = ("run", "status", "task", "objective", "method", "model", "metric", "seed", "step", "dev", "test")
WORDS = ("run", "status", "task", "objective", "method", "model", "metric")
SHOWN = ("task.name", "objective.name", "objective.loss", "optimizer.name", "peft.name", "model.path", "seed", "steps")
DISPENSABLE = ("metric", "model", "objective")  # the first is the first to go; then settings, the last first
LAST = ("step", "task", "seed", "method")  # go only where the terminal is narrower than 80 columns
RUN_WIDTH = 20  # to which the column of the directories is folded in a narrow terminal


@dataclass(frozen=True)
class Listed:
    """One run of the list.

    Attributes:
        name: its directory, seen from the folder that is listed.
        settings: its config as it is stored; empty for a damaged run.
        record: what `--json` prints.
        mark: stands behind its scores.
    """

    name: str
    settings: Mapping[str, Any]
    record: Mapping[str, Any]
    mark: str = ""

    @cached_property
    def cells(self) -> Mapping[str, str]:
        """Column -> text."""
        record = self.record
        if record["status"] == "damaged":
            return {"run": self.name, "status": "damaged"}
        is_plain = record["loss"] == "cross_entropy"
        own = {
            "run": self.name,
            "status": "diverged" if record["verdict"] == "diverged" else record["status"],
            "objective": record["objective"] if is_plain else f"{record['objective']} {record['loss']}",
            "method": " ".join(name for name in (record["optimizer"], record["peft"]) if name != "none"),
            "model": Path(record["model"]).name,
            "step": f"{record['step']}/{record['steps']}",
        }
        scores = {split: record[split] for split in ("dev", "test")}
        for split, score in scores.items():
            own[split] = "-" if score is None else f"{format_score(record['metric'], score)}{self.mark}"
        return {name: own.get(name) or str(record[name]) for name in COLUMNS}


def runs(path: Path | None, sort: str | None = None, as_json: bool = False, quiet: bool = False) -> None:
    """Print a table of runs: status, settings, scores; below it why runs failed or are damaged."""
    (folder,) = folders_or_outputs([] if path is None else [path])
    order = _parse_sort(sort)
    listed = [_read(run, folder) for run in find_runs(folder)]
    if order is not None:
        listed.sort(key=order)
    if as_json:
        settings, keys = _differences(listed)
        records = zip((run.record for run in listed), settings, strict=True)
        document = [{**record, "settings": {key: one[key] for key in keys} if one else None} for record, one in records]
        print_line(json.dumps(document, indent=2))
    elif quiet:
        for run in listed:
            if "\n" in run.name:
                raise UserError(f"{run.name!r}: a name with a line feed, and -q prints one path per line: rename it")
            print_line(str(folder / run.name))
    elif not listed:
        print_line(f"no runs under {folder}")
    else:
        _show(listed)


def _parse_sort(name: str | None) -> Callable[[Listed], tuple[bool, Any]] | None:
    """Return the sort key of a run; None for the order in which they began.

    Scores are sorted from the best on, everything else from the least on. Runs without the value come last.
    """
    known = (*COLUMNS, "start", "end")
    if name is None:
        return None
    if name not in known and name not in key_owners():
        near = did_you_mean(name, (*known, *key_owners()))
        raise UserError(f"--sort {name}: allowed are {join(known)}, and the key of a setting{near}")

    def order(run: Listed) -> tuple[bool, Any]:
        record = run.record
        value = record.get({"method": "optimizer"}.get(name, name)) if name in known else _setting(run.settings, name)
        if value is None or not run.settings:
            return True, 0
        if name in ("dev", "test"):
            return False, -_judging_config(record["objective"]).order_of(record["metric"]) * value
        return False, value if isinstance(value, (int, float)) else format_value(value)

    return order


def _differences(listed: Sequence[Listed]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the settings of each run by dotted key (empty for a damaged one), and the keys that differ."""
    flat = fill([flatten_values(run.settings) for run in listed], lambda key: _setting({}, key))
    keys = differing_keys([one for one, run in zip(flat, listed, strict=True) if run.settings])
    return [one if run.settings else {} for one, run in zip(flat, listed, strict=True)], keys


# --- one run ---


def _setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return a setting of a stored config, or the default of a key that did not exist when it was stored."""
    for source in (settings, _defaults()):
        value: Any = source
        for part in key.split("."):
            value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
        if value != MISSING:
            return value
    return None


_defaults = cache(defaults)


@cache
def _judging_config(objective: str) -> Config:
    """Return a config that orders values of an objective's metrics; as usual for a plug-in that is not installed."""
    try:
        return Config(objective=OBJECTIVES.load(objective)(name=objective))
    except UserError:
        return Config()


def _read(run: Run, folder: Path) -> Listed:
    name = os.path.relpath(run.path, folder)
    settings: Mapping[str, Any] = {}
    try:
        info, text = run.read()
        settings = read_settings(text)
        status = run.status(info)
        step, scores, problem, summary = _progress(run, info, settings, status)
    except UserError as error:
        return Listed(name, settings, {"run": str(run.path), "status": "damaged", "problem": one_line(error)})
    keys = {"task": "task.name", "objective": "objective.name", "loss": "objective.loss", "optimizer": "optimizer.name"}
    keys |= {"peft": "peft.name", "model": "model.path"}
    record = {
        "run": str(run.path),
        "status": status,
        **{name: str(_setting(settings, key)) for name, key in keys.items()},
        "metric": _metric(info, settings),
        "seed": _setting(settings, "seed"),
        "step": step,
        "steps": _setting(settings, "steps"),
        **scores,
        "verdict": summary.get("verdict"),
        "start": info.get("start"),
        "end": info.get("end"),
        "problem": problem,
    }
    return Listed(name, settings, record, f" {MARK}" if picked_start(summary) else "")


def _progress(
    run: Run, info: Mapping[str, Any], settings: Mapping[str, Any], status: str
) -> tuple[int, dict[str, float | None], str | None, dict[str, Any]]:
    """Return the steps done, `dev` and `test` in the metric that picks `best`, why the run failed, the summary.

    The scores of a finished run are those of its best checkpoint, which that metric has chosen. Before the end `dev`
    is the best so far.
    """
    metric = _metric(info, settings)
    steps = int(_setting(settings, "steps"))
    if status == "finished":
        summary = run.read_summary()
        steps = summary.get("steps", steps)  # it may have ended before the last one
        if _is_replayable(str(_setting(settings, "optimizer.name"))):
            trajectory.check_length(run.trajectory, steps)
        scores = {split: _score(run, summary.get(split), metric) for split in ("dev", "test")}
        return steps, scores, None, summary
    done, lines = trajectory.count_steps(run.trajectory), run.metrics()
    problem = f"{info.get('error')}" if status == "failed" else None
    dev = [line for line in lines if line.get("split") == "dev" and metric in line]
    ranks = _judging_config(str(_setting(settings, "objective.name")))
    best = min(dev, key=lambda line: ranks.rank(line, metric))[metric] if dev else None
    step = max((line["step"] for line in lines), default=0)
    return max(step, done), {"dev": best, "test": None}, problem, {"verdict": info.get("verdict")}


def _metric(info: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the metric that picks the best checkpoint; run.json says it once the data are read."""
    return str(info.get("metric") or _setting(settings, "task.metric") or "accuracy")


def _is_replayable(optimizer: str) -> bool:
    """Whether an optimizer writes a trajectory; False for one of a package that is not installed here."""
    try:
        return bool(OPTIMIZERS.load(optimizer).replayable)
    except UserError:
        return False


def _score(run: Run, scores: Any, metric: str) -> float | None:
    if scores is None:
        return None
    try:
        return float(scores[metric])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run.path / 'summary.json'} is damaged: it lacks {metric}") from error


# --- the table ---


def _show(listed: Sequence[Listed]) -> None:
    """Print the table and the problems. What does not fit the terminal is said above the table, or left out."""
    console = make_console()
    settings, keys = _differences(listed)
    keys = [key for key in keys if not matches(key, WITHOUT_EFFECT)] or keys
    own = telling_keys([one for one in settings if one], keys)
    titles = {key: short_name(key) for key in own if key not in SHOWN}
    rows = [
        {**run.cells, **{title: format_value(one[key]) for key, title in titles.items() if one}}
        for run, one in zip(listed, settings, strict=True)
    ]
    columns, same, hidden = _fit(rows, list(titles.values()), console.width)
    if same:
        print_line("all: " + ", ".join(f"{name} {value}" for name, value in same.items()))
    if hidden:
        print_line(f"not shown, for lack of width: {join(hidden)}")
    header, *lines = _table([dict(zip(columns, columns, strict=True)), *rows], console.width)
    console.print(Text(header, style="bold"), soft_wrap=True)
    print_line("\n".join(lines))
    if any(run.cells.get("dev", "").endswith(MARK) for run in listed):
        print_line(NOTE)
    for run in listed:
        if run.record["problem"] is not None:
            print_line(f"{run.name}: {' '.join(run.record['problem'].split())}")


def _table(rows: Sequence[Mapping[str, str]], width: int) -> Iterator[str]:
    """Yield the lines of a table: numbers and settings to the right, the first column folded if `width` is too small.

    With rich's table a list of 1,000 runs takes twice the time (scripts/bench/bench_reports.py).
    """
    columns = list(rows[0])
    cells = [[printable(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    widths[0] = max(len(columns[0]), min(widths[0], width - sum(2 + one for one in widths[1:])))
    for run, *others in cells:
        texts = [
            set_cell_size(text, size) if name in WORDS else " " * (size - cell_len(text)) + text
            for name, text, size in zip(columns[1:], others, widths[1:], strict=True)
        ]
        first, *more = chop_cells(run, widths[0]) or [""]
        yield "  ".join([set_cell_size(first, widths[0]), *texts]).rstrip()
        yield from more


def _fit(
    rows: Sequence[Mapping[str, str]], own: Sequence[str], width: int
) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the columns that fit a width, those with one value in all rows, and those that have to be left out.

    `own` are the columns of the settings that differ, which stand before the steps and go last.
    """
    step = COLUMNS.index("step")
    columns, same, hidden = [*COLUMNS[:step], *own, *COLUMNS[step:]], {}, []
    needed = {name: 2 + max(len(name), *(len(row.get(name, "")) for row in rows)) for name in columns}
    needed["run"] = min(needed["run"], RUN_WIDTH + 2)
    if sum(needed.values()) > width and len(rows) > 1:
        for name in (*DISPENSABLE, *LAST[1:]):
            values = {row[name] for row in rows if name in row}
            if len(values) == 1:
                same[name] = values.pop()
                columns.remove(name)
    further = [name for name in reversed(own) if name != "lr"]
    for name in (*DISPENSABLE, *further, *LAST, "lr"):
        if name in columns and sum(needed[one] for one in columns) > width:
            hidden.append(name)
            columns.remove(name)
    return columns, {name: same[name] for name in COLUMNS if name in same}, hidden
