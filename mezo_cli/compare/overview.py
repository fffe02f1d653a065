"""The comparison itself: a row a group, mean (std) of test over the data seeds, the paper's number beside it."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from mezo_cli.compare import beside
from mezo_cli.compare.groups import Group, Pick, told_point
from mezo_cli.compare.paper import paper
from mezo_cli.compare.sheet import Sheet, View

COLUMNS = ("task", "shots", "method", "steps", "seeds", "dev", "test", "paper", "diff")
PROTOCOL = "the best dev score of each data seed over the grid; mean and population std (ddof 0) of its test score"


def overview(groups: Sequence[Group], seeds: bool) -> View:
    """Return the table of all groups; with `seeds` also what was picked for each data seed."""
    sheets = []
    for (model, objective, loss), members in groupby(groups, key=lambda g: (g.model, g.objective, g.loss)):
        rows = [_row(group) for group in members]
        columns = COLUMNS if any(row[-2] for row in rows) else COLUMNS[:-2]  # no number of the paper's, no columns
        sheets.append(Sheet(f"{model}, {objective}, {loss}", columns, [row[: len(columns)] for row in rows], left=3))
    if seeds:
        sheets += _picks(groups)
    records = [record(group) for group in groups]
    document = {"protocol": PROTOCOL, "unit": "percent", "paper": paper().source, "groups": list(map(_whole, groups))}
    return View(sheets, notes(groups), records, document)


def notes(groups: Sequence[Group]) -> list[str]:
    """Tell what is missing, what is not as in the paper, and what the marks mean."""
    said = [f"{group.title}: {trouble}" for group in groups for trouble in group.troubles]
    numbers = [(group, beside.number_for(group)) for group in groups]
    for group, number in numbers:
        other = beside.unlike(group) if beside.difference(group, number) is not None else []
        if other:
            said.append(f"{group.title}: * unlike the paper: {'; '.join(other)}")
    if any(number is not None and number.uncertain for _, number in numbers):
        said.append("? the paper's number was read from a damaged table")
    return said


def seeds_told(group: Group) -> str:
    """Return how many data seeds have a result, of how many that ought to: `5`, `3/5`."""
    return f"{len(group.picks)}/{len(group.expected)}" if group.missing else str(len(group.picks))


def percent(value: float | None, std: float | None = None) -> str:
    """Return a fraction as the paper prints it: `90.5 (1.2)`."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}" + ("" if std is None else f" ({100 * std:.1f})")


def _row(group: Group) -> list[str]:
    number = beside.number_for(group)
    points = beside.difference(group, number)
    mark = "" if points is None or not beside.unlike(group) else " *"
    told = [group.metric] if group.metric != "accuracy" else []
    told += ["demo data"] if group.demo else []
    task = f"{group.task} ({', '.join(told)})" if told else group.task
    shown = [percent(group.dev), percent(group.mean, group.std), str(number or ""), ""]
    if points is not None:
        shown[-1] = f"{points:+.1f}{mark}"
    return [task, _shots(group), group.label, str(group.steps), seeds_told(group), *shown]


def _picks(groups: Sequence[Group]) -> list[Sheet]:
    rows = []
    for group in groups:
        for seed, pick in sorted(group.picks.items()):
            scores = [percent(pick.dev), percent(pick.test)]
            point = told_point(pick.point, group.grid)
            rows.append([group.task, _shots(group), group.label, point, str(seed), *scores])
    return [Sheet("what was picked", ("task", "shots", "method", "picked", "seed", "dev", "test"), rows, left=4)]


def _shots(group: Group) -> str:
    return "all" if group.shots is None else str(group.shots)


# --- for programs ---


def _hundred(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 4)


def record(group: Group) -> dict[str, Any]:
    """Return a group as one flat row."""
    number = beside.number_for(group)
    points = beside.difference(group, number)
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
        "dev_mean": _hundred(group.dev),
        "test_mean": _hundred(group.mean),
        "test_std": _hundred(group.std),
        **(dict.fromkeys(("paper_mean", "paper_std", "paper_uncertain")) if number is None else number.record()),
        "difference": None if points is None else round(points, 4),
        "unlike_paper": "; ".join(beside.unlike(group)) if points is not None else None,
        "seeds": " ".join(map(str, sorted(group.picks))),
        "missing": " ".join(map(str, group.missing)),
        "troubles": "; ".join(group.troubles),
    }


def _whole(group: Group) -> dict[str, Any]:
    """Return a group with its seeds and settings."""
    picks = {str(seed): _picked(pick) for seed, pick in sorted(group.picks.items())}
    lists = {"missing": group.missing, "troubles": group.troubles}
    return {**record(group), **lists, "seeds": picks, "settings": dict(group.recipe)}


def _picked(pick: Pick) -> dict[str, Any]:
    runs = [entry.where for entry in pick.entries]
    return {"dev": _hundred(pick.dev), "test": _hundred(pick.test), "picked": dict(pick.point), "runs": runs}
