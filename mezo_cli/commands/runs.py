"""`mezo runs`: list the runs under a folder."""

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from mezo_cli.commands.open_run import folders_or_outputs
from mezo_cli.config.explain import key_owners
from mezo_cli.console import make_console, print_line, printable
from mezo_cli.errors import UserError, did_you_mean, join, one_line
from mezo_cli.report.entries import Entry, read_entry
from mezo_cli.report.settings import differing_keys, format_value
from mezo_cli.report.tables import run_rows
from mezo_cli.runs import Run, find_runs
from mezo_cli.runs.contents import MARK, NOTE

SCORES = {"dev": "dev", "before": "test_before", "test": "test"}  # column -> split
WORDS = ("run", "status", "task", "objective", "method", "model", "metric")
COLUMNS = (*WORDS, "seed", "step", *SCORES, "verdict")
NAMES = {  # field of what `--json` prints -> the setting that it is
    "task": "task.name",
    "objective": "objective.name",
    "loss": "objective.loss",
    "optimizer": "optimizer.name",
    "peft": "peft.name",
    "model": "model.path",
}
# The first is the first to go; then settings, the last first.
DISPENSABLE = ("metric", "model", "objective", "before", "verdict")
LAST = ("step", "task", "seed", "method")  # go only where the terminal is narrower than 80 columns
PIPE_WIDTH = 80  # from which on a column of one value is said above the table, also where any width would do
RUN_WIDTH = 20  # to which the column of the directories is folded in a narrow terminal


class Listed(NamedTuple):
    """One run of the list."""

    name: str  # its directory seen from the folder that is listed
    record: Mapping[str, Any]  # what `--json` prints
    run: Entry | None = None  # none if it is damaged


def runs(path: Path | None, sort: str | None = None, as_json: bool = False, quiet: bool = False) -> None:
    """Print a table of runs: status, settings, scores; below it why runs failed or are damaged."""
    (folder,) = folders_or_outputs([] if path is None else [path])
    order = _parse_sort(sort)
    listed = [_read(run, folder) for run in find_runs(folder)]
    if order is not None:
        listed.sort(key=order)
    if as_json:
        keys, document = differing_keys([one.run.settings for one in listed if one.run is not None]), []
        for one in listed:
            differing = None if one.run is None else {key: one.run.settings.get(key) for key in keys}
            document.append({**one.record, "settings": differing})
        print_line(json.dumps(document, indent=2))
    elif quiet:
        for run in listed:
            print_line(str(folder / run.name))
    elif not listed:
        print_line(f"no runs under {folder}")
    else:
        _show(listed)


def _parse_sort(name: str | None) -> Callable[[Listed], tuple[bool, Any]] | None:
    """Return the sort key of a run; None for the order in which they began.

    Scores are sorted from the best on, everything else from the least on. Runs without the value come last.
    """
    sortable = (*COLUMNS, "start", "end")
    if name is None:
        return None
    if name not in sortable and name not in key_owners():
        near = did_you_mean(name, (*sortable, *key_owners()))
        raise UserError(f"--sort {name}: allowed are {join(sortable)}, and the key of a setting{near}")

    def order(listed: Listed) -> tuple[bool, Any]:
        run = listed.run
        fields = listed.record if name in sortable or run is None else run.settings
        value = fields.get({"method": "optimizer"}.get(name, name))
        if value is None or run is None:
            return True, 0
        if name in SCORES:
            return False, -run.config.order_of(run.metric) * value
        return False, value if isinstance(value, (int, float)) else format_value(value)

    return order


def _read(run: Run, folder: Path) -> Listed:
    name = os.path.relpath(run.path, folder)
    try:
        entry = read_entry(run)
    except (UserError, OSError) as error:
        return Listed(name, {"run": str(run.path), "status": "damaged", "problem": one_line(error)})
    record = {
        "run": str(run.path),
        "status": entry.status,
        **{name: entry.settings[key] for name, key in NAMES.items()},
        "metric": entry.metric,
        "seed": entry.config.seed,
        "step": entry.steps_done,
        "steps": entry.config.steps,
        **{name: entry.score(split) for name, split in SCORES.items()},
        "verdict": entry.verdict,
        "start": entry.info.get("start"),
        "end": entry.info.get("end"),
        "problem": f"{entry.info.get('error')}" if entry.status == "failed" else None,
    }
    return Listed(name, record, entry)


def _show(listed: Sequence[Listed]) -> None:
    console = make_console()
    sound = {one.name: one.run for one in listed if one.run is not None}
    cells = {name: {**row, "run": name} for name, row in zip(sound, run_rows(list(sound.values())), strict=True)}
    rows = [cells.get(one.name, {"run": one.name, "status": "damaged"}) for one in listed]
    columns, same, hidden = _fit(rows, console.width)
    if same:
        told = ", ".join(f"{name} {value}" for name, value in same.items() if value != "-")
        print_line("\n".join(textwrap.wrap(f"all: {told}", max(console.width, PIPE_WIDTH))))
    if hidden:
        print_line(f"not shown, for lack of width: {join(hidden)}")
    header, *lines = _table([dict(zip(columns, columns, strict=True)), *rows], console.width)
    console.print(Text(header, style="bold"), soft_wrap=True)
    print_line("\n".join(lines))
    if any(row.get("dev", "").endswith(MARK) for row in rows):
        print_line(NOTE)
    for one in listed:
        if one.record["problem"] is not None:
            print_line(f"{one.name}: {' '.join(one.record['problem'].split())}")


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


def _fit(rows: Sequence[Mapping[str, str]], width: int) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the columns that fit a width, those with one value in all rows, and those that have to be left out."""
    columns = max(map(list, rows), key=len)  # of a run that is not damaged
    of_settings, same, hidden = [name for name in columns if name not in COLUMNS], {}, []
    needed = {name: 2 + max(len(name), *(len(row.get(name, "")) for row in rows)) for name in columns}
    needed["run"] = min(needed["run"], RUN_WIDTH + 2)
    if sum(needed.values()) > min(width, PIPE_WIDTH) and sum("task" in row for row in rows) > 1:
        for name in [name for name in columns if name in (*DISPENSABLE, *LAST[1:])]:
            values = {row[name] for row in rows if name in row}
            if len(values) == 1:
                same[name] = values.pop()
                columns.remove(name)
    for name in (*DISPENSABLE, *(name for name in reversed(of_settings) if name != "lr"), *LAST, "lr"):
        if name in columns and sum(needed[one] for one in columns) > width:
            hidden.append(name)
            columns.remove(name)
    return columns, same, hidden
