"""Build the tables of `mezo compare`: groups of runs, the paper's table, and objectives run by run."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from mezo_cli.console import format_duration
from mezo_cli.errors import UserError
from mezo_cli.report.aggregate import Group, Pick, format_point, format_shots, group_runs, unlike_paper
from mezo_cli.report.paper import Row, paper
from mezo_cli.report.read import Entry, Scores, Statistics, statistics_of
from mezo_cli.report.render import Comparison, Table
from mezo_cli.report.settings import (
    flatten,
    format_value,
    grid_settings,
    group_settings,
    method_name,
    objective_order,
)
from mezo_cli.runs.picked import MARK, NOTE

GROUP_COLUMNS = ("task", "shots", "method", "steps", "seeds", "dev", "test", "paper", "diff")
PROTOCOL = "the best dev score of each data seed over the grid; mean and population std (ddof 0) of its test score"
INFERRED = (
    "expected data seeds are inferred from the rows of the same task, shots and model: all that these have, or"
    " 13 21 42 87 100 if they are among them"
)
UNCERTAIN = "? the paper's number was read from a damaged table"
WIDE = 120  # terminal columns from which on the paper's six tasks fit into one table
MOSTLY_ZERO = 0.5  # share of projected gradients that are exactly 0 from which on a note says so


def format_percent(value: float | None, std: float | None = None) -> str:
    """Return a fraction as the paper prints it: `90.5 (1.2)`."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}" + ("" if std is None else f" ({100 * std:.1f})")


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 4)


# --- groups of runs ---


def group_view(groups: Sequence[Group], seeds: bool) -> Comparison:
    """Return one row per group: mean (std) of test over the data seeds, and the paper's number.

    With `seeds`, a further table shows the picked point of each data seed.
    """
    tables = []
    for (model, objective, loss), members in groupby(groups, key=lambda g: (g.model, g.objective, g.loss)):
        rows = [_group_row(group) for group in members]
        columns = GROUP_COLUMNS if any(row[-2] for row in rows) else GROUP_COLUMNS[:-2]  # no number of the paper
        tables.append(Table(f"{model}, {objective}, {loss}", columns, [row[: len(columns)] for row in rows], left=3))
    if seeds:
        tables.append(_pick_table(groups))
    document = {"protocol": PROTOCOL, "unit": "percent", "paper": paper().source}
    details = [_group_details(group) for group in groups]
    return Comparison(tables, _group_notes(groups), list(map(_group_record, groups)), {**document, "groups": details})


def _group_row(group: Group) -> list[str]:
    marks: list[str] = [group.metric] if group.metric != "accuracy" else []
    marks += ["demo data"] if group.demo else []
    task = f"{group.task} ({', '.join(marks)})" if marks else group.task
    difference = ""
    if group.difference is not None:
        difference = f"{group.difference:+.1f}{' *' if unlike_paper(group) else ''}"
    scores = [_marked(group, group.dev), _marked(group, group.mean, group.std)]
    return [
        *(task, _shots_cell(group), group.label, str(group.steps), _seeds_cell(group)),
        *(*scores, str(group.paper_number or ""), difference),
    ]


def _marked(of: Group | Pick | Entry, value: float | None, std: float | None = None) -> str:
    """Return a score, with a mark if it is that of the model before training."""
    marked = value is not None and (of.at_start if isinstance(of, Group) else of.picked_start)
    return format_percent(value, std) + (f" {MARK}" if marked else "")


def _pick_table(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        for seed, pick in sorted(group.picks.items()):
            scores = [_marked(pick, pick.dev), _marked(pick, pick.test)]
            point = format_point(pick.point, group.grid)
            rows.append([group.task, _shots_cell(group), group.label, point, str(seed), *scores])
    return Table("picked per data seed", ("task", "shots", "method", "picked", "seed", "dev", "test"), rows, left=4)


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
    """Return a group as one flat record."""
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
        "dev_mean": _percent(group.dev),
        "test_mean": _percent(group.mean),
        "test_std": _percent(group.std),
        **(dict.fromkeys(("paper_mean", "paper_std", "paper_uncertain")) if number is None else number.record()),
        "difference": None if difference is None else round(difference, 4),
        "unlike_paper": "; ".join(unlike_paper(group)) if difference is not None else None,
        "seeds": " ".join(map(str, sorted(group.picks))),
        "missing": " ".join(map(str, group.missing)),
        "step_0_picked": " ".join(map(str, group.at_start)),
        "verdicts": " ".join(f"{verdict}:{count}" for verdict, count in group.verdicts.items()),
        "troubles": "; ".join(group.troubles),
    }


def _group_details(group: Group) -> dict[str, Any]:
    """Return a group with its seeds and settings."""
    picks = {str(seed): _pick_details(pick) for seed, pick in sorted(group.picks.items())}
    lists = {"missing": group.missing, "troubles": group.troubles}
    lists |= {"step_0_picked": group.at_start, "verdicts": group.verdicts}
    return {**_group_record(group), **lists, "seeds": picks, "settings": dict(group.settings)}


def _pick_details(pick: Pick) -> dict[str, Any]:
    runs = [entry.location for entry in pick.entries]
    verdicts = [entry.verdict for entry in pick.entries]
    scores = {"dev": _percent(pick.dev), "test": _percent(pick.test), "verdicts": verdicts}
    return {**scores, "picked": dict(pick.point), "runs": runs}


# --- the paper's table ---


def paper_view(groups: Sequence[Group], width: int) -> Comparison:
    """Return the paper's whole table with the user's results below its rows.

    A terminal of fewer than `WIDE` columns gets the tasks in two tables.
    """
    shown = [group for group in groups if _in_paper_table(group)]
    tasks = paper().tasks
    parts = [tasks] if width >= WIDE else [tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]]
    tables = [Table("", ("shots", "method", *part), _paper_lines(shown, part), left=2) for part in parts]
    notes = [f"paper: {paper().source}; {paper().model}, mean (std) of test over five data seeds"]
    notes += _group_notes(shown)
    notes += [] if UNCERTAIN in notes else [UNCERTAIN]
    rest = len(groups) - len(shown)
    if rest:
        notes.append(f"{rest} group{'s' if rest > 1 else ''} of other tasks, data or shots: see mezo compare")
    cells = [cell for row in paper().rows for cell in _paper_cells(row, shown)]
    cells += [{"row": None, **_group_record(group)} for group in shown if group.paper_row is None]
    return Comparison(tables, notes, cells, {"paper": paper().source, "unit": "percent", "cells": cells})


def _in_paper_table(group: Group) -> bool:
    known = group.task in paper().tasks and group.shots in {row.shots for row in paper().rows}
    return known and not group.demo


def _paper_lines(groups: Sequence[Group], tasks: Sequence[str]) -> list[list[str]]:
    """Return the lines of the table: below each of the paper's rows the user's, and at the end of the shots others."""
    lines: list[list[str]] = []
    for shots in dict.fromkeys(row.shots for row in paper().rows):
        section: list[list[str]] = []
        own = [group for group in groups if group.shots == shots]
        for row in (row for row in paper().rows if row.shots == shots):
            section.append([row.label, *(str(row.numbers.get(task, "")) for task in tasks)])
            same = [group for group in own if group.paper_row is row]
            section += _own_lines(same, tasks, _variant_name) or [["  yours", *("-" for _ in tasks)]]
        section += _own_lines([group for group in own if group.paper_row is None], tasks, _full_name)
        lines += [[str(shots) if number == 0 else "", *line] for number, line in enumerate(section)]
    return lines


def _own_lines(groups: Sequence[Group], tasks: Sequence[str], name: Callable[[Group], str]) -> list[list[str]]:
    """Return one line per name of a group, and one with the differences if the paper has numbers."""
    lines = []
    for title in dict.fromkeys(map(name, groups)):
        by_task = {group.task: group for group in groups if name(group) == title}
        lines.append([title, *(_result_cell(by_task.get(task)) for task in tasks)])
        points = [by_task[task].difference if task in by_task else None for task in tasks]
        if any(value is not None for value in points):
            lines.append(["  difference", *("" if value is None else f"{value:+.1f}" for value in points)])
    return lines


def _result_cell(group: Group | None) -> str:
    if group is None:
        return "-"
    return _marked(group, group.mean, group.std) + (f" {_seeds_cell(group)}" if group.missing else "")


def _variant_name(group: Group) -> str:
    """Return `  yours`, and the settings that differ from the paper's row."""
    usual = paper().settings(group.method).get("steps")
    steps = [f"steps={group.steps}"] if group.steps and group.steps != usual else []
    texts = [group.label.removeprefix(group.method).strip(" ()"), *steps]
    variant = ", ".join(text for text in texts if text)
    return f"  yours: {variant}" if variant else "  yours"


def _full_name(group: Group) -> str:
    """Return the full name of a group that matches no row of the paper."""
    objective = [text for text in (group.objective, group.loss) if text not in (paper().objective, "cross_entropy")]
    steps = [f"steps={group.steps}"] if group.steps else []
    return f"yours: {group.label}, {', '.join([group.model, *objective, *steps])}"


def _paper_cells(row: Row, groups: Sequence[Group]) -> Iterable[dict[str, Any]]:
    """Yield one record per number of a row and matching group; a number without a group has n = 0."""
    name = f"{row.label}, k={row.shots}"
    for task in paper().tasks:
        same = [group for group in groups if group.task == task and group.paper_row is row]
        yield from ({"row": name, **_group_record(group)} for group in same)
        if not same and task in row.numbers:
            empty = {"task": task, "shots": row.shots, "method": row.method, "loss": row.loss, "n": 0}
            yield {"row": name, **empty, **row.numbers[task].record()}


# --- objectives, run by run ---


class Common(NamedTuple):
    """What runs must have in common to be compared run by run."""

    task: str
    model: str
    seed: int
    fingerprint: str  # of the data

    @property
    def short_fingerprint(self) -> str:
        """The first characters of the data fingerprint."""
        return self.fingerprint[:8]


def objective_view(entries: Sequence[Entry], width: int) -> Comparison:
    """Return one table per set of comparable runs, with one column per run, for a terminal of `width` columns.

    Raises:
        UserError: when no run has been evaluated yet, or all that have are damaged.
    """
    sets: dict[Common, list[Statistics]] = defaultdict(list)
    left_out: list[str] = []
    damaged: list[str] = []
    for entry in entries:
        try:
            found = statistics_of(entry, damaged.append)
        except UserError as error:
            damaged.append(f"{entry.location} is left out: {error}")
            continue
        if found is None:
            left_out.append(f"{entry.location} is left out: {entry.trouble()}, before its first evaluation")
        else:
            config = entry.config
            sets[Common(config.task.name, config.model.path, config.seed, str(entry.data_fingerprint))].append(found)
    if not sets and damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        raise UserError(f"no run here can be compared: {damaged[0]}{more}")
    if not sets:
        raise UserError("no run here has been evaluated yet")
    shown = {common: sorted(runs, key=_run_order) for common, runs in sorted(sets.items()) if _differ(runs)} or sets
    tables: list[Table] = []
    notes = [*_set_notes(list(sets)), *_hidden_notes(sets, shown)]
    for common, runs in shown.items():
        tables += _run_tables(common, runs, width)
        notes += _run_notes(common, runs, len(shown) > 1)
    tables += _seed_tables([run for runs in shown.values() for run in runs])
    records = [{**common._asdict(), **_run_record(run)} for common, runs in shown.items() for run in runs]
    document = {"unit": "percent", "runs": records}
    return Comparison(tables, [*notes, *damaged, *left_out], [_flat_record(record) for record in records], document)


def _differ(runs: Sequence[Statistics]) -> bool:
    """Return whether the runs have more than one objective or loss."""
    return len({objective_order(run.entry.config) for run in runs}) > 1


def _run_order(run: Statistics) -> tuple[Any, ...]:
    config = run.entry.config
    return (*objective_order(config), method_name(config), config.optimizer.lr, run.entry.start)


def _run_tables(common: Common, runs: Sequence[Statistics], width: int) -> list[Table]:
    """Return tables with one column per run, as many per table as the terminal holds."""
    shots = format_shots(runs[0].entry.shots)
    model = Path(common.model).name
    title = f"{common.task}, {model}, {shots}, seed {common.seed}, data {common.short_fingerprint}"
    tables: list[Table] = []
    for columns in _split_columns([_run_column(run, runs) for run in runs], width):
        names = list(dict.fromkeys(name for column in columns for name in column))
        head, *body = [[name, *(column.get(name, "-") for column in columns)] for name in names]
        tables.append(Table(f"{title}, continued" if tables else title, head, body))
    return tables


def _split_columns(columns: Sequence[Mapping[str, str]], width: int) -> list[list[Mapping[str, str]]]:
    """Return the columns of runs in groups that fit a width, beside the names of their rows."""
    names = 1 + max(len(name) for column in columns for name in column)
    groups: list[list[Mapping[str, str]]] = []
    left = 0
    for column in columns:
        needed = 1 + max(map(len, column.values()))
        if not groups or needed > left:
            groups.append([])
            left = width - names
        groups[-1].append(column)
        left -= needed
    return groups


def _run_column(run: Statistics, runs: Sequence[Statistics]) -> dict[str, str]:
    """Return the cells of a run: row name -> text. Settings other than lr are shown if the runs differ in them."""
    entry, config = run.entry, run.entry.config
    cells = {"objective": config.objective.name, "loss": config.objective.loss}
    if len({method_name(other.entry.config) for other in runs}) > 1:
        cells["method"] = method_name(config)
    if any(not other.entry.finished for other in runs):
        cells["status"] = entry.status
    cells |= {"steps": str(entry.steps_done), "lr": format_value(config.optimizer.lr)}
    cells |= {key.split(".", 1)[-1]: format_value(flatten(config).get(key)) for key in _varying_settings(runs)}
    cells |= _gradient_cells(run) | _loss_cells(run)
    if any(other.entry.verdict for other in runs):
        cells["verdict"] = entry.verdict or "-"
    for split in ("train", "dev", "test"):
        scores: Scores | None = getattr(entry, split)
        cells[f"{split} accuracy"] = _marked(entry, None if scores is None else scores.accuracy)
        if config.task.metric != "accuracy":
            cells[f"{split} {config.task.metric}"] = _marked(entry, None if scores is None else scores.score)
    rows = sum(run.predicted.values())
    cells["predictions on"] = run.predicted_split
    cells |= {f"predicted {label}": f"{n / rows:.1%}" for label, n in run.predicted.items()}
    cells["one label only?"] = _one_label_cell(run)
    cells["forwards"] = "-" if run.forwards is None else str(run.forwards)
    if any(other.backwards for other in runs):
        cells["backwards"] = "-" if run.backwards is None else str(run.backwards)
    cells["time"] = format_duration(run.seconds)
    return cells


def _varying_settings(runs: Sequence[Statistics]) -> list[str]:
    """Return the settings in which the runs differ, except those that every table shows."""
    shown = ("objective.name", "objective.loss", "optimizer.name", "optimizer.lr", "peft.name", "init", "steps")
    given = [group_settings(run.entry) | grid_settings(run.entry.config) for run in runs]
    keys = dict.fromkeys(key for settings in given for key in settings if key not in shown and key != "data.dir")
    values = {key: {format_value(settings[key]) for settings in given if key in settings} for key in keys}
    return [key for key, found in values.items() if len(found) > 1]


def _gradient_cells(run: Statistics) -> dict[str, str]:
    found = run.projected_grad
    if found["zero_fraction"] is None:
        return {}
    sizes = {"|g| mean": "mean_abs", "|g| min": "min_abs", "|g| max": "max_abs"}
    return {"g = 0 in": f"{found['zero_fraction']:.1%}"} | {name: f"{found[key]:.3g}" for name, key in sizes.items()}


def _loss_cells(run: Statistics) -> dict[str, str]:
    pairs = {"dev loss": run.dev_losses} | ({"train loss": run.train_losses} if run.train_losses else {})
    return {
        f"{name}, {end}": f"{pair[i]:.4f}" for name, pair in pairs.items() for i, end in enumerate(("first", "last"))
    }


def _one_label_cell(run: Statistics) -> str:
    label, share = run.most_predicted
    if share == 1:
        return f"ALL {label}"
    return f"NEARLY {label}" if run.predicts_one_label else "no"


def _set_notes(sets: Sequence[Common]) -> list[str]:
    """Return why there is more than one table."""
    if len(sets) < 2:
        return []
    notes = ["a table compares only runs on the same rows, with the same seed and from the same model"]
    for common in sorted({each._replace(fingerprint="") for each in sets}):
        found = sorted(each.short_fingerprint for each in sets if each._replace(fingerprint="") == common)
        if len(found) > 1:
            notes.append(f"{common.task}, seed {common.seed}: the runs had different rows (data {', '.join(found)})")
    return notes


def _hidden_notes(sets: Mapping[Common, Sequence[Statistics]], shown: Mapping[Common, Any]) -> list[str]:
    """Return that there is nothing to compare, or how many runs have nothing to be compared with."""
    if not any(map(_differ, sets.values())):
        return ["only one objective and one loss each: `mezo train -m experiment=objectives` runs four to compare"]
    rest = sum(len(runs) for common, runs in sets.items() if common not in shown)
    if not rest:
        return []
    return [f"not shown: {rest} run{'s' if rest > 1 else ''} with no other objective or loss to compare"]


def _run_notes(common: Common, runs: Sequence[Statistics], several: bool) -> list[str]:
    """Return notes on runs that predict one label only, have mostly zero gradients, or did not finish."""
    prefix = f"{common.task}, seed {common.seed}, data {common.short_fingerprint}: " if several else ""
    notes = [NOTE] if any(run.entry.picked_start for run in runs) else []
    for run in runs:
        config = run.entry.config
        name = f"{prefix}{config.objective.name} {config.objective.loss}, lr={format_value(config.optimizer.lr)}"
        label, share = run.most_predicted
        if run.predicts_one_label:
            rows = f"every {run.predicted_split} row" if share == 1 else f"{share:.1%} of {run.predicted_split} rows"
            notes.append(f"{name}: predicts {label} for {rows}")
        zero = run.projected_grad["zero_fraction"]
        if zero is not None and zero >= MOSTLY_ZERO:
            notes.append(f"{name}: g is exactly 0 in {zero:.1%} of all samples, which then change nothing")
        if not run.entry.finished:
            notes.append(f"{name}: {run.entry.trouble()}")
    return notes


# --- objectives, over several seeds ---

SEED_COLUMNS = ("objective", "method", "runs", "g = 0", "|g|", "train", "dev", "test", "one label")


def _seed_tables(runs: Sequence[Statistics]) -> list[Table]:
    """Return a table for each task, model and shots with several seeds: means, and the population std of test.

    One row per point of a group's grid, over its finished runs; `one label` counts those that predict one label only.
    """
    by_path = {run.entry.run.path: run for run in runs if run.entry.finished}
    groups = group_runs(run.entry for run in by_path.values())
    tables = []
    for common, members in groupby(sorted(groups, key=_seed_key), key=_seed_key):
        rows = [row for group in members for row in _seed_rows(group, by_path)]
        if any(int(row[SEED_COLUMNS.index("runs")]) > 1 for row in rows):
            tables.append(Table(f"{', '.join(common)}, over the seeds above", SEED_COLUMNS, rows, left=2))
    return tables


def _seed_key(group: Group) -> tuple[str, str, str]:
    return group.task, group.model, format_shots(group.shots)


def _seed_rows(group: Group, by_path: Mapping[Path, Statistics]) -> list[list[str]]:
    rows = []
    for point in group.grid:
        entries = [entry for entry in group.entries if tuple(grid_settings(entry.config).items()) == point]
        runs = [by_path[entry.run.path] for entry in entries]
        zeros, sizes = (_known(run.projected_grad[key] for run in runs) for key in ("zero_fraction", "mean_abs"))
        train, dev, test = (
            _known(scores and scores.accuracy for scores in (getattr(entry, split) for entry in entries))
            for split in ("train", "dev", "test")
        )
        rows.append(
            [
                f"{group.objective} {group.loss}",
                f"{group.label}, {format_point(point, group.grid)}",
                str(len(runs)),
                f"{statistics.fmean(zeros):.1%}" if zeros else "-",
                f"{statistics.fmean(sizes):.3g}" if sizes else "-",
                format_percent(_mean(train)),
                format_percent(_mean(dev)),
                format_percent(_mean(test), statistics.pstdev(test) if len(test) > 1 else None),
                f"{sum(run.predicts_one_label for run in runs)} of {len(runs)}",
            ]
        )
    return rows


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# --- records of single runs ---


def _run_record(run: Statistics) -> dict[str, Any]:
    entry, config = run.entry, run.entry.config
    first, last = run.train_losses or (None, None)
    scores = {
        f"{split}_accuracy": None if found is None else _percent(found.accuracy)
        for split, found in (("train", entry.train), ("dev", entry.dev), ("test", entry.test))
    }
    return {
        "shots": entry.shots,
        "data_seed": entry.data_seed,
        "objective": config.objective.name,
        "loss": config.objective.loss,
        "method": method_name(config),
        **{key.removeprefix("optimizer."): value for key, value in grid_settings(config).items()},
        "steps": entry.steps_done,
        "status": entry.status,
        "verdict": entry.verdict,
        **run.projected_grad,
        "loss_first": first,
        "loss_last": last,
        "dev_loss_first": run.dev_losses[0],
        "dev_loss_last": run.dev_losses[1],
        **scores,
        "predicted": dict(run.predicted),
        "predicted_on": run.predicted_split,
        "one_answer": run.most_predicted[0] if run.predicts_one_label else None,
        "forwards": run.forwards,
        "backwards": run.backwards,
        "seconds": run.seconds,
        "run": entry.location,
    }


def _flat_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record for CSV: the label counts as one text."""
    return {**record, "predicted": " ".join(f"{label}:{n}" for label, n in record["predicted"].items())}
