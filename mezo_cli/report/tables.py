"""The tables of `mezo runs` and `mezo compare`: runs, groups of runs, and the paper's table; to read, or as CSV."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from mezo_cli.console import TextTable, plain_text
from mezo_cli.report.entries import Entry, no_runs, read_runs
from mezo_cli.report.groups import Group, format_shots, group_runs, mean_score, unlike_paper
from mezo_cli.report.paper import TABLE, Number, Paper, Row, find_table
from mezo_cli.report.settings import format_mean, format_value, short_name, shown_value, telling_keys
from mezo_cli.runs.contents import MARK, NOTE

if TYPE_CHECKING:  # `mezo predict` writes its CSV here too
    import pandas as pd

PROTOCOL = "the point of the grid with the best dev score of each data seed; mean and population std (ddof 0) of test"
INFERRED = (
    "expected data seeds are inferred from the rows of the same task, shots and model: all that these have, or"
    " 13 21 42 87 100 if they are among them"
)
UNCERTAIN = "? the paper's number was read from a damaged table"
COST_NOISE = 1.2
# Settings that a column of `run_rows` shows anyway.
SHOWN = ("task.name", "objective.name", "objective.loss", "optimizer.name", "peft.name", "model.path", "seed", "steps")
UNIT = "percent; a metric that is no fraction, as it is"
SHORT = 14  # a column of texts up to this width is never folded
COLUMN = {True: 13, False: 9}  # characters of a task's column in a table of means and stds, or of single runs


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs: tables and notes to read, records of groups, numbers or runs for CSV, a document (JSON)."""

    tables: Sequence["pd.DataFrame"]
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = ()
    document: Mapping[str, Any] = field(default_factory=dict)


def make_table(title: str, rows: "Sequence[Mapping[str, str | None]] | pd.DataFrame", left: int = 1) -> "pd.DataFrame":
    """Return a table of texts, `-` where a row has none. The first `left` columns are words, the others numbers."""
    import pandas as pd

    table = pd.DataFrame(rows, dtype=object).fillna("-")
    table.attrs.update(title=title, left=left)
    return table


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables and, below them, the notes. In a narrow terminal long words are folded; numbers never."""
    for table in comparison.tables:
        if table.attrs["title"]:
            console.print(plain_text(table.attrs["title"]))
        text = TextTable(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        for number, name in enumerate(table):
            words = number < table.attrs["left"]
            folded = words and table.iloc[:, number].str.len().max() > SHORT
            text.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not folded)
        for row in table.to_numpy():
            text.add_row(*row)
        console.print(text, end="\n\n")
    for note in dict.fromkeys(comparison.notes):
        item = TextTable.grid(padding=(0, 1))  # a hanging indent
        item.add_row("-", note)
        console.print(item)


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV. A text that a spreadsheet would run as a formula gets a `'` before it."""
    import pandas as pd

    return str(pd.DataFrame(records, dtype=object).map(_cell).to_csv(index=False))


def _cell(value: Any) -> Any:
    """Return a list or mapping as the text of one cell: `13 21`, `negative:4 positive:6`, sentences with semicolons."""
    if isinstance(value, Mapping):
        value = " ".join(f"{key}:{entry}" for key, entry in value.items())
    elif isinstance(value, list):
        value = ("; " if any(isinstance(entry, str) for entry in value) else " ").join(map(str, value))
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def comparison(
    folders: Sequence[Path], width: int, warn: Callable[[str], None], table: str | None = None
) -> Comparison:
    """Return a comparison of all runs under `folders`: mean and std over data seeds; or `paper_view` of a table.

    `warn` is called for each directory that cannot be read as a run.
    """
    entries, warnings = read_runs(folders)
    for text in warnings:
        warn(text)
    if table is None and not entries:
        raise no_runs(folders, warnings)
    groups = group_runs(entries)
    return group_view(groups) if table is None else paper_view(groups, width, table)


def run_rows(runs: Sequence[Entry]) -> list[dict[str, str]]:
    """Return the cells of each run by column: what it was, the settings in which the runs differ, what it came to."""
    keys = [key for key in telling_keys([run.settings for run in runs]) if key not in SHOWN]
    rows = []
    for run in runs:
        config, objective = run.config, [run.config.objective.name, run.config.objective.loss]
        row = {
            "run": run.location,
            "status": run.outcome,
            "task": config.task.name,
            "objective": " ".join(name for name in objective if name != "cross_entropy"),
            "method": " ".join(name for name in (config.optimizer.name, config.peft.name) if name != "none"),
            "model": run.model,
            "metric": run.metric,
            "seed": str(config.seed),
            **{short_name(key): format_value(run.settings.get(key)) for key in keys},
            "step": f"{run.steps_done}/{config.steps}",
        }
        for name, split in (("dev", "dev"), ("before", "test_before"), ("test", "test")):
            row[name] = format_mean(run.metric, run.score(split), marked=run.picked_start and name != "before")
        rows.append({**row, "verdict": run.verdict or "-"})
    return rows


def group_view(groups: Sequence[Group]) -> Comparison:
    """Return one row per group: mean (std) of test over the data seeds, and the paper's number."""
    tables = []
    for title, members in groupby(groups, key=lambda g: f"{g.model}, {g.objective}, {g.loss}"):
        same = list(members)
        table = make_table(title, [_group_row(group) for group in same], left=4)
        empty = [name for name in ("paper", "diff") if not table["paper"].any()]
        empty += [name for name in ("before", "verdict", "chosen") if (table[name] == "-").all()]
        for name in ("peak GB", "s/step"):  # a cost that differs between groups by no more than the noise of a machine
            costs = [cost for group in same if (cost := _costs(group)[name])]
            empty += [name] if not costs or max(costs) <= COST_NOISE * min(costs) else []
        table.attrs["left"] -= "chosen" in empty
        tables.append(table.drop(columns=empty))
    records = [_group_record(group) for group in groups]
    pairs = zip(groups, records, strict=True)
    details = [{**record, "seeds": _seed_details(group), "settings": group.settings} for group, record in pairs]
    document = {"protocol": PROTOCOL, "unit": UNIT, "paper": find_table().source, "groups": details}
    return Comparison(tables, _group_notes(groups), records, document)


def _group_row(group: Group) -> dict[str, str | None]:
    marks = [group.metric] * (group.metric != "accuracy") + ["demo data"] * group.demo
    return {
        "task": f"{group.task} ({', '.join(marks)})" if marks else group.task,
        "shots": format_shots(group.shots, ""),
        "method": group.label,
        "chosen": " or ".join(group.chosen) or None,
        "steps": str(group.steps),
        "seeds": str(len(group.results)),
        "dev": format_mean(group.metric, group.dev, marked=bool(group.at_start)),
        "before": format_mean(group.metric, group.before),
        "test": format_mean(group.metric, group.mean, group.std, marked=bool(group.at_start)),
        "verdict": group.verdict or None,
        **{name: "" if value is None else f"{value:.2g}" for name, value in _costs(group).items()},
        "paper": "" if group.paper_number is None else group.paper_number.text,
        "diff": "" if group.difference is None else f"{group.difference:+.1f}{' *' * bool(unlike_paper(group))}",
    }


def _costs(group: Group) -> dict[str, float | None]:
    peaks = [run.summary["peak_memory_bytes"] / 1e9 for run in group.results if run.summary.get("peak_memory_bytes")]
    steps = [run.summary["seconds"] / run.summary["steps"] for run in group.results if run.summary.get("steps")]
    figures = {"peak GB": peaks, "s/step": steps}
    return {name: float(np.median(values)) if values else None for name, values in figures.items()}


def _group_notes(groups: Sequence[Group], with_missing: bool = False) -> list[str]:
    notes = [f"{group.title}: {text}" for group in groups for text in (*group.troubles, *group.edges())]
    for group in groups:
        if with_missing and (absent := sorted(group.expected - {run.data_seed for run in group.runs})):
            notes.append(f"{group.title}: not run: seed{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}")
    notes += [NOTE] * any(group.at_start for group in groups)
    for group in groups:
        if 0 < len(group.at_start) < len(group.picks):
            notes.append(f"{group.title}: {MARK} for {len(group.at_start)} of {len(group.picks)} data seeds")
        if diverged := sum(run.verdict == "diverged" for run in group.entries):
            notes.append(f"{group.title}: {diverged} of {len(group.entries)} runs diverged")
        if group.difference is not None and (other := unlike_paper(group)):
            notes.append(f"{group.title}: * unlike the paper: {'; '.join(other)}")
    if any(group.paper_number is not None and group.paper_number.uncertain for group in groups):
        notes.append(UNCERTAIN)
    return [*notes, *[INFERRED] * (with_missing and any(group.missing for group in groups))]


def _group_record(group: Group) -> dict[str, Any]:
    difference = group.difference
    return {
        **{name: getattr(group, name) for name in ("task", "metric", "shots", "model", "objective", "loss", "method")},
        "label": group.label,
        "steps": group.steps,
        "n": len(group.tests),
        "dev_mean": shown_value(group.metric, group.dev),
        "before_mean": shown_value(group.metric, group.before),
        "test_mean": shown_value(group.metric, group.mean),
        "test_std": shown_value(group.metric, group.std),
        **_paper_fields(group.paper_number),
        "difference": None if difference is None else round(difference, 4),
        "unlike_paper": "; ".join(unlike_paper(group)) if difference is not None else None,
        "seeds": list(group.picks),
        "missing": group.missing,
        "step_0_picked": group.at_start,
        "diverged": group.diverged,
        "verdict": group.verdict or None,
        "chosen": group.chosen,
        "edges": group.edges(),
        "troubles": group.troubles,
    }


def _paper_fields(number: Number | None) -> dict[str, float | bool | None]:
    return dict(zip(("paper_mean", "paper_std", "paper_uncertain"), number[1:] if number else [None] * 3, strict=True))


def _seed_details(group: Group) -> dict[str, Any]:
    splits = {"dev": "dev", "before": "test_before", "test": "test"}
    return {
        str(seed): {
            **{key: shown_value(group.metric, mean_score(runs, of, group.metric)) for key, of in splits.items()},
            "verdicts": [run.verdict for run in runs],
            "picked": dict(runs[0].point),
            "runs": [run.location for run in runs],
        }
        for seed, runs in group.picks.items()
    }


def paper_view(groups: Sequence[Group], width: int, table: str = TABLE) -> Comparison:
    """Return one of the paper's whole tables, by name, with the user's results below its rows.

    Where its tasks take more than `width` characters, they come in several tables.
    """
    whole = find_table(table)
    sections = list(dict.fromkeys(whole.section(row.model, row.shots) for row in whole.rows))
    of_table = [group for group in groups if group.task in whole.tasks and not group.demo]
    shown = [group for group in of_table if whole.section(group.model, group.shots) in sections]
    first = "shots" if whole.has_shots else "model"
    lines = make_table("", [line for section in sections for line in _section_lines(whole, section, first, shown)], 2)
    beside = max(1, (width - 40) // COLUMN[whole.has_shots])
    parts = np.array_split(list(whole.tasks), -(-len(whole.tasks) // beside))
    notes = [f"paper: {whole.source}; {whole.about}", *whole.notes, *_group_notes(shown, with_missing=True)]
    if UNCERTAIN not in notes and any(number.uncertain for row in whole.rows for number in row.numbers.values()):
        notes.append(UNCERTAIN)
    if rest := len(groups) - len(shown):
        notes.append(f"{rest} group{'s' if rest > 1 else ''} of other tasks, data or shots: see mezo compare")
    cells = [cell for row in whole.rows for cell in _paper_cells(whole, row, shown)]
    cells += [{"row": None, **_group_record(group)} for group in shown if group.paper_row is None]
    document = {"paper": whole.source, "unit": UNIT, "cells": cells}
    return Comparison([lines[[first, "method", *part]] for part in parts], notes, cells, document)


def _section_lines(table: Paper, section: str, first: str, groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return the lines of some shots or a model: below each of the paper's rows the user's, and at the end others.

    A score has the number of data seeds with a result, of those expected, where one is missing: `91.0 (0.2) 3/5`.
    """
    of_section = [group for group in groups if table.section(group.model, group.shots) == section]
    empty, missing, lines = dict.fromkeys(table.tasks, ""), dict.fromkeys(table.tasks, "-"), []
    rows: list[Row | None] = [row for row in table.rows if table.section(row.model, row.shots) == section]
    for row in (*rows, None):
        of_row = [group for group in of_section if group.paper_row is row]
        same: dict[str, list[Group]] = {} if of_row or row is None else {"  yours": []}
        for group in of_row:
            same.setdefault(_own_name(group), []).append(group)
        if row is not None:
            lines.append({"method": row.label, **empty, **{task: one.text for task, one in row.numbers.items()}})
        for name, members in same.items():
            cells = {}
            for group in members:
                cells[group.task] = format_mean(group.metric, group.mean, group.std, bool(group.at_start))
                if group.missing:
                    cells[group.task] += f" {len(group.picks)}/{len(group.expected)}"
            lines.append({"method": name, **missing, **cells})
            points = {one.task: f"{one.difference:+.1f}" for one in members if one.difference is not None}
            lines += [{"method": "  difference", **empty, **points}] if points else []
    return [{first: section if line is lines[0] else "", **line} for line in lines]


def _own_name(group: Group) -> str:
    """Return `  yours` and the settings that differ from the paper's row; in full where there is no such row."""
    steps = f"steps={group.steps}" if group.steps else ""
    if group.paper_row is None:
        usual = {*group.paper.tasks.get(group.task, {}).get("objectives", ()), "cross_entropy"}
        objective = [text for text in (group.objective, group.loss) if text not in usual]
        return f"yours: {', '.join(filter(None, [group.label, group.model, *objective, steps]))}"
    if group.steps == group.paper.settings(group.method).get("steps"):
        steps = ""
    variant = ", ".join(filter(None, [group.label.removeprefix(group.method).strip(" ()"), steps]))
    return f"  yours: {variant}" if variant else "  yours"


def _paper_cells(table: Paper, row: Row, groups: Sequence[Group]) -> Iterable[dict[str, Any]]:
    """Yield one record per number of a row and matching group; a number without a group has n = 0."""
    name = f"{row.label}, k={row.shots}" if table.has_shots else f"{row.label}, {row.model}"
    for task in table.tasks:
        same = [group for group in groups if group.task == task and group.paper_row is row]
        yield from ({"row": name, **_group_record(group)} for group in same)
        if not same and task in row.numbers:
            empty = {"task": task, "shots": row.shots, "method": row.method, "loss": table.loss(row, task), "n": 0}
            yield {"row": name, "model": row.model, **empty, **_paper_fields(row.numbers[task])}
