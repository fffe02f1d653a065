"""Build the tables of `mezo compare`: groups of runs, the paper's table, and objectives run by run."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from mezo_cli.errors import UserError
from mezo_cli.report.aggregate import Group, format_points, format_shots, group_runs, unlike_paper
from mezo_cli.report.details import RunDetails
from mezo_cli.report.equal_forwards import forwards_view
from mezo_cli.report.output import Comparison, make_table
from mezo_cli.report.paper import TABLE, Paper, Row, paper
from mezo_cli.report.read import Entry, left_out, no_runs, read_runs
from mezo_cli.report.settings import format_mean, format_value, method_name, objective_order, shown_value
from mezo_cli.runs.picked import MARK, NOTE

VIEWS = ("groups", "seeds", "paper", "objectives", "forwards")
PROTOCOL = "the best dev score of each data seed over the grid; mean and population std (ddof 0) of its test score"
INFERRED = (
    "expected data seeds are inferred from the rows of the same task, shots and model: all that these have, or"
    " 13 21 42 87 100 if they are among them"
)
UNCERTAIN = "? the paper's number was read from a damaged table"
UNIT = "percent; a metric that is no fraction, as it is"
COLUMN = {True: 13, False: 9}  # characters of a task's column in a table of means and stds, or of single runs


def comparison(
    folders: Sequence[Path], view: str, width: int, warn: Callable[[str], None], table: str = TABLE
) -> Comparison:
    """Return a comparison of all runs under `folders`, for `output.show` or `output.write`.

    Args:
        folders: where to look for run directories, at any depth.
        view: `groups` (mean and std over data seeds), `seeds` (also the picked point of each data seed), `paper` (the
            paper's whole table with the runs' results), `objectives` (one column per run), or `forwards` (methods at
            equal forwards).
        width: characters per line that a table may take; some views split a table that is wider.
        warn: called for each directory that cannot be read as a run.
        table: which of the paper's tables the view `paper` shows.
    """
    entries, warnings = read_runs(folders)
    for text in warnings:
        warn(text)
    if view == "paper":
        return paper_view(group_runs(entries), width, table)
    if not entries:
        raise no_runs(folders, warnings)
    if view == "objectives":
        return objective_view(entries, width)
    if view == "forwards":
        return forwards_view(entries)
    return group_view(group_runs(entries), seeds=view == "seeds")


# --- groups of runs ---


def group_view(groups: Sequence[Group], seeds: bool) -> Comparison:
    """Return one row per group: mean (std) of test over the data seeds, and the paper's number.

    With `seeds`, a further table shows the picked point of each data seed.
    """
    tables = []
    for title, members in groupby(groups, key=lambda g: f"{g.model}, {g.objective}, {g.loss}"):
        table = make_table(title, [_group_row(group) for group in members], left=3)
        tables.append(table if table["paper"].any() else table.drop(columns=["paper", "diff"]))
    if seeds:
        rows = [row for group in groups for row in _pick_rows(group)]
        tables.append(make_table("picked per data seed", rows, left=4))
    records = [_group_record(group) for group in groups]
    details = [
        {**record, "seeds": _seed_details(group), "settings": dict(group.settings)}
        for group, record in zip(groups, records, strict=True)
    ]
    document = {"protocol": PROTOCOL, "unit": UNIT, "paper": paper().source, "groups": details}
    return Comparison(tables, _group_notes(groups), records, document)


def _group_row(group: Group) -> dict[str, str]:
    """Return the cells of a group, by column."""
    marks = [group.metric] * (group.metric != "accuracy") + ["demo data"] * group.demo
    difference = "" if group.difference is None else f"{group.difference:+.1f}{' *' if unlike_paper(group) else ''}"
    return {
        "task": f"{group.task} ({', '.join(marks)})" if marks else group.task,
        "shots": _shots_cell(group),
        "method": group.label,
        "steps": str(group.steps),
        "seeds": _seeds_cell(group),
        "dev": format_mean(group.metric, group.dev, marked=bool(group.at_start)),
        "test": format_mean(group.metric, group.mean, group.std, marked=bool(group.at_start)),
        "paper": str(group.paper_number or ""),
        "diff": difference,
    }


def _pick_rows(group: Group) -> list[dict[str, str]]:
    """Return the cells of each data seed's picked point, by column."""
    points = format_points(group.grid)
    return [
        {
            "task": group.task,
            "shots": _shots_cell(group),
            "method": group.label,
            "picked": points[pick.point],
            "seed": str(pick.Index),
            "dev": format_mean(group.metric, pick.dev, marked=pick.at_start),
            "test": format_mean(group.metric, pick.test, marked=pick.at_start),
        }
        for pick in group.picks.itertuples()
    ]


def _shots_cell(group: Group) -> str:
    return "all" if group.shots is None else str(group.shots)


def _seeds_cell(group: Group) -> str:
    """Return how many data seeds have a result, of how many that should have one: `5`, `3/5`."""
    return f"{len(group.picks)}/{len(group.expected)}" if group.missing else str(len(group.picks))


def _group_notes(groups: Sequence[Group]) -> list[str]:
    """Return notes on what is missing, what differs from the paper, and what the marks mean."""
    notes = [f"{group.title}: {trouble}" for group in groups for trouble in group.troubles]
    notes += [NOTE] if any(group.at_start for group in groups) else []
    for group in groups:
        if 0 < len(group.at_start) < len(group.picks):
            notes.append(f"{group.title}: {MARK} for {len(group.at_start)} of {len(group.picks)} data seeds")
        if group.verdicts.get("diverged"):
            notes.append(f"{group.title}: {group.verdicts['diverged']} of {len(group.entries)} runs diverged")
        other = unlike_paper(group) if group.difference is not None else []
        if other:
            notes.append(f"{group.title}: * unlike the paper: {'; '.join(other)}")
    if any(group.paper_number is not None and group.paper_number.uncertain for group in groups):
        notes.append(UNCERTAIN)
    return [*notes, *[INFERRED] * any(group.missing for group in groups)]


def _group_record(group: Group) -> dict[str, Any]:
    """Return a group as plain values."""
    number, difference = group.paper_number, group.difference
    return {
        "task": group.task,
        "metric": group.metric,
        "shots": group.shots,
        "model": group.model,
        "objective": group.objective,
        "loss": group.loss,
        "method": group.method,
        "label": group.label,
        "steps": group.steps,
        "n": len(group.tests),
        "dev_mean": shown_value(group.metric, group.dev),
        "test_mean": shown_value(group.metric, group.mean),
        "test_std": shown_value(group.metric, group.std),
        **(dict.fromkeys(("paper_mean", "paper_std", "paper_uncertain")) if number is None else number.record()),
        "difference": None if difference is None else round(difference, 4),
        "unlike_paper": "; ".join(unlike_paper(group)) if difference is not None else None,
        "seeds": list(map(int, group.picks.index)),
        "missing": group.missing,
        "step_0_picked": group.at_start,
        "verdicts": group.verdicts,
        "troubles": group.troubles,
    }


def _seed_details(group: Group) -> dict[str, Any]:
    """Return data seed -> its scores, the picked point and its runs."""
    return {
        str(pick.Index): {
            "dev": shown_value(group.metric, pick.dev),
            "test": shown_value(group.metric, pick.test),
            "verdicts": [entry.verdict for entry in pick.entries],
            "picked": dict(group.grid[pick.point]),
            "runs": [entry.location for entry in pick.entries],
        }
        for pick in group.picks.itertuples()
    }


# --- the paper's tables ---


def paper_view(groups: Sequence[Group], width: int, table: str = TABLE) -> Comparison:
    """Return one of the paper's whole tables with the user's results below its rows.

    A terminal that is too narrow for all tasks gets them in several tables.
    """
    whole = paper(table)
    sections = dict.fromkeys(whole.section(row.model, row.shots) for row in whole.rows)
    shown = [group for group in groups if group.task in whole.tasks and not group.demo]
    shown = [group for group in shown if whole.section(group.model, group.shots) in sections]
    lines = make_table("", [line for section in sections for line in _section_lines(whole, section, shown)], left=2)
    first, tasks = lines.columns[0], list(whole.tasks)
    size = next(n for n in range(len(tasks), 0, -1) if n == 1 or COLUMN[whole.has_shots] * n + 40 <= width)
    size = -(-len(tasks) // -(-len(tasks) // size))  # as many in each table
    parts = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    notes = [f"paper: {whole.source}; {whole.about}", *whole.notes, *_group_notes(shown)]
    is_uncertain = any(number.uncertain for row in whole.rows for number in row.numbers.values())
    notes += [UNCERTAIN] if is_uncertain and UNCERTAIN not in notes else []
    rest = len(groups) - len(shown)
    if rest:
        notes.append(f"{rest} group{'s' if rest > 1 else ''} of other tasks, data or shots: see mezo compare")
    cells = [cell for row in whole.rows for cell in _paper_cells(whole, row, shown)]
    cells += [{"row": None, **_group_record(group)} for group in shown if group.paper_row is None]
    document = {"paper": whole.source, "unit": UNIT, "cells": cells}
    return Comparison([lines[[first, "method", *part]] for part in parts], notes, cells, document)


def _section_lines(table: Paper, section: str, groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return the lines of some shots or a model: below each of the paper's rows the user's, and at the end others."""
    lines, own = [], [group for group in groups if table.section(group.model, group.shots) == section]
    for row in (row for row in table.rows if table.section(row.model, row.shots) == section):
        lines.append(_line(table, row.label, {task: str(number) for task, number in row.numbers.items()}, ""))
        same = [group for group in own if group.paper_row is row]
        lines += _own_lines(table, same, _variant_name) or [_line(table, "  yours", {}, "-")]
    lines += _own_lines(table, [group for group in own if group.paper_row is None], _full_name)
    first = "shots" if table.has_shots else "model"
    return [{first: section if number == 0 else "", **line} for number, line in enumerate(lines)]


def _line(table: Paper, method: str, cells: Mapping[str, str], empty: str) -> dict[str, str]:
    return {"method": method, **{task: cells.get(task, empty) for task in table.tasks}}


def _own_lines(table: Paper, groups: Sequence[Group], name: Callable[[Group], str]) -> list[dict[str, str]]:
    """Return one line per name of a group, and one with the differences if the paper has numbers."""
    lines = []
    for title in dict.fromkeys(map(name, groups)):
        same = [group for group in groups if name(group) == title]
        lines.append(_line(table, title, {group.task: _result_cell(group) for group in same}, "-"))
        points = {group.task: f"{group.difference:+.1f}" for group in same if group.difference is not None}
        lines += [_line(table, "  difference", points, "")] if points else []
    return lines


def _result_cell(group: Group) -> str:
    score = format_mean(group.metric, group.mean, group.std, bool(group.at_start))
    return score + (f" {_seeds_cell(group)}" if group.missing else "")


def _variant_name(group: Group) -> str:
    """Return `  yours`, and the settings that differ from the paper's row."""
    usual = group.paper.settings(group.method).get("steps")
    steps = [f"steps={group.steps}"] if group.steps and group.steps != usual else []
    texts = [group.label.removeprefix(group.method).strip(" ()"), *steps]
    variant = ", ".join(text for text in texts if text)
    return f"  yours: {variant}" if variant else "  yours"


def _full_name(group: Group) -> str:
    """Return the full name of a group that matches no row of the paper."""
    usual = {*group.paper.tasks[group.task].objectives, "cross_entropy"} if group.task in group.paper.tasks else set()
    objective = [text for text in (group.objective, group.loss) if text not in usual]
    steps = [f"steps={group.steps}"] if group.steps else []
    return f"yours: {group.label}, {', '.join([group.model, *objective, *steps])}"


def _paper_cells(table: Paper, row: Row, groups: Sequence[Group]) -> Iterable[dict[str, Any]]:
    """Yield one record per number of a row and matching group; a number without a group has n = 0."""
    name = f"{row.label}, k={row.shots}" if table.has_shots else f"{row.label}, {row.model}"
    for task in table.tasks:
        same = [group for group in groups if group.task == task and group.paper_row is row]
        yield from ({"row": name, **_group_record(group)} for group in same)
        if not same and task in row.numbers:
            empty = {"task": task, "shots": row.shots, "method": row.method, "loss": table.loss(row, task), "n": 0}
            yield {"row": name, "model": row.model, **empty, **row.numbers[task].record()}


# --- objectives, run by run ---

# Settings that are fields of a run's record, or stand in the title of its table.
SHOWN = ("objective.name", "objective.loss", "optimizer.name", "peft.name", "init", "steps", "data.dir", "data.shots")
UNLESS_DIFFERENT = ("method", "status", "eps", "batch_size", "weight_decay", "backwards")  # fields that are then no row
NOT_SHOWN = ("task", "model", "seed", "fingerprint", "shots", "data_seed", "run")


COMMON = ("task", "model", "seed", "fingerprint")  # what runs must have in common to be compared run by run
Common = tuple[str, str, int, str]


def objective_view(entries: Sequence[Entry], width: int) -> Comparison:
    """Return one table per set of comparable runs, with one column per run, for a terminal of `width` columns."""
    runs, unread = _evaluated(entries)
    sets: dict[Common, list[RunDetails]] = defaultdict(list)
    for run in sorted(runs, key=_run_order):
        config = run.config
        sets[config.task.name, config.model.path, config.seed, str(run.entry.data_fingerprint)].append(run)
    differing = {key: members for key, members in sets.items() if len({_objective(run) for run in members}) > 1}
    shown = dict(sorted((differing or sets).items()))
    notes = _set_notes(sets, shown) if len(sets) > 1 else []
    tables, records = [], []
    for common, members in shown.items():
        fields = [{**dict(zip(COMMON, common, strict=True)), **_run_record(run)} for run in members]
        tables += _run_tables(common, members, fields, width)
        records += fields
        notes += [f"{run.name}: {run.entry.trouble()}" for run in members if not run.entry.finished]
        notes += [text for run in members for text in run.damage]
    return Comparison(tables, [*notes, *unread], records, {"unit": UNIT, "runs": records})


def _evaluated(entries: Sequence[Entry]) -> tuple[list[RunDetails], list[str]]:
    """Return the runs that have been evaluated, and why the others are left out."""
    runs, early, damaged = [], [], []
    for entry in entries:
        try:
            run = RunDetails(entry)
            _ = run.gradient_stats  # reads the trajectory
        except UserError as error:
            damaged.append(left_out(entry.run, error))
            continue
        if run.dev:
            runs.append(run)
        else:
            early.append(f"{entry.location} is left out: {entry.trouble()}, before its first evaluation")
    if not runs:
        reason = f"can be compared: {damaged[0]}" if damaged else "has been evaluated yet"
        raise UserError(f"no run here {reason}")
    return runs, damaged + early


def _objective(run: RunDetails) -> tuple[str, str]:
    return run.config.objective.name, run.config.objective.loss


def _run_order(run: RunDetails) -> tuple[Any, ...]:
    config = run.config
    return (*objective_order(config), method_name(config), config.optimizer.lr, run.entry.start)


def _run_tables(
    common: Common, runs: Sequence[RunDetails], records: Sequence[Mapping[str, Any]], width: int
) -> list[pd.DataFrame]:
    """Return tables with one column per run, a row per field of its record, as many runs as the terminal holds."""
    shots = format_shots(runs[0].entry.shots)
    task, model, seed, data = common
    title = f"{task}, {Path(model).name}, {shots}, seed {seed}, data {data[:8]}"
    rows = [_expanded(record, "predicted") for record in records]
    fields = pd.DataFrame(rows, dtype=object).dropna(axis=1, how="all").drop(columns=list(NOT_SHOWN), errors="ignore")
    same = [name for name in UNLESS_DIFFERENT if name in fields and fields[name].nunique(dropna=False) == 1]
    cells = pd.concat([fields.drop(columns=same).map(_cell), _differing_settings(runs)], axis=1).fillna("-").T
    widths = 1 + cells.map(len).max()
    tables: list[pd.DataFrame] = []
    while cells.shape[1]:
        fitting = max(1, (1 + cells.index.str.len().max() + widths[cells.columns].cumsum() <= width).sum())
        table = cells.iloc[1:, :fitting].reset_index()
        table.columns = [cells.index[0], *cells.iloc[0, :fitting]]  # its first row is its header
        table.attrs.update(title=f"{title}, continued" if tables else title, left=1)
        tables.append(table)
        cells = cells.iloc[:, fitting:]
    return tables


def _expanded(record: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a record with the entries of one of its fields, a mapping, as fields."""
    entries = {f"{field} {name}": value for name, value in (record[field] or {}).items()}
    return {key: value for key, value in record.items() if key != field} | entries


def _cell(value: Any) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _differing_settings(runs: Sequence[RunDetails]) -> pd.DataFrame:
    """Return the settings in which the runs differ, except those that every table shows; a column per setting."""
    settings = (run.entry.group_settings() for run in runs)
    texts = pd.DataFrame([{key: format_value(value) for key, value in one.items()} for one in settings])
    return texts[[key for key, count in texts.nunique().items() if count > 1 and key not in SHOWN]]


def _set_notes(sets: Mapping[Common, Sequence[RunDetails]], shown: Mapping[Common, Any]) -> list[str]:
    """Return why there is more than one set of runs, and how many runs have nothing to be compared with."""
    notes = ["a table compares only runs on the same rows, with the same seed and from the same model"]
    rows = defaultdict(list)
    for common in sets:
        rows[common[:3]].append(common[3][:8])
    for (task, _, seed), data in sorted(rows.items()):
        if len(data) > 1:
            notes.append(f"{task}, seed {seed}: the runs had different rows (data {', '.join(sorted(data))})")
    if not any(len({_objective(run) for run in members}) > 1 for members in shown.values()):
        notes.append("only one objective and one loss each: `mezo train -m experiment=objectives` runs four to compare")
    rest = sum(len(members) for common, members in sets.items() if common not in shown)
    return notes + [f"not shown: {rest} runs with no other objective or loss to compare"] * bool(rest)


def _run_record(run: RunDetails) -> dict[str, Any]:
    """Return a run as plain values: `loss` that of the batches, `one_answer` the only label."""
    entry, config, one, last = run.entry, run.config, run.one_label(), run.last or {}
    return {
        "shots": entry.shots,
        "data_seed": entry.data_seed,
        "objective": config.objective.name,
        "loss": config.objective.loss,
        "method": method_name(config),
        **{key.removeprefix("optimizer."): value for key, value in entry.grid_settings().items()},
        "steps": entry.steps_done,
        "status": entry.status,
        "verdict": entry.verdict,
        "best_step": (entry.summary.get("best") or {}).get("step"),
        **run.gradient_stats,
        "loss_first": float(run.losses[0]) if len(run.losses) else None,
        "loss_last": float(run.losses[-1]) if len(run.losses) else None,
        "dev_loss_first": run.dev[0]["loss"],
        "dev_loss_last": run.dev[-1]["loss"],
        **{
            f"{split}_{name}": shown_value(name, value)
            for split in ("train", "dev", "test")
            for name, value in entry.scores.get(split, {}).items()
            if name != "loss"
        },
        "predicted": last.get("predicted"),
        "predicted_on": last.get("split"),
        "one_answer": None if one is None else one[0],
        "forwards": entry.summary.get("forwards"),
        "backwards": entry.summary.get("backwards"),
        "seconds": run.total_seconds,
        "run": entry.location,
    }
