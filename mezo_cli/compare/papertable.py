"""The paper's whole table, every row of it, with the user's own rows below."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mezo_cli.compare import beside
from mezo_cli.compare.groups import Group
from mezo_cli.compare.overview import notes, percent, record, seeds_told
from mezo_cli.compare.paper import Row, paper
from mezo_cli.compare.sheet import Sheet, View

WIDE = 120  # columns of a terminal that holds all six tasks beside one another


def paper_table(groups: Sequence[Group], width: int) -> View:
    """Return the table for a terminal of `width` columns: a narrow one gets the tasks in two halves."""
    inside = [group for group in groups if _has_place(group)]
    tasks = paper().tasks
    halves = [tasks] if width >= WIDE else [tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]]
    sheets = [Sheet("", ("shots", "method", *half), _lines(inside, half), left=2) for half in halves]
    said = [f"paper: {paper().source}; {paper().model}, mean (std) of test over five data seeds", *notes(inside)]
    uncertain = "? the paper's number was read from a damaged table"
    said += [] if uncertain in said else [uncertain]
    rest = len(groups) - len(inside)
    if rest:
        said.append(f"{rest} group{'s' if rest > 1 else ''} of other tasks, data or shots: mezo compare has them all")
    cells = [cell for row in paper().rows for cell in _cells(row, inside)]
    cells += [{"row": None, **record(group)} for group in inside if beside.row_for(group) is None]
    return View(sheets, said, cells, {"paper": paper().source, "unit": "percent", "cells": cells})


def _has_place(group: Group) -> bool:
    known = group.task in paper().tasks and group.shots in {row.shots for row in paper().rows}
    return known and not group.demo


def _lines(groups: Sequence[Group], tasks: Sequence[str]) -> list[list[str]]:
    """Return the lines of all shots: each row of the paper's, the user's of the same kind below it, then all others."""
    lines: list[list[str]] = []
    for shots in dict.fromkeys(row.shots for row in paper().rows):
        section: list[list[str]] = []
        own = [group for group in groups if group.shots == shots]
        for row in (row for row in paper().rows if row.shots == shots):
            section.append([row.label, *(str(row.numbers.get(task, "")) for task in tasks)])
            mine = [group for group in own if beside.row_for(group) is row]
            section += _own(mine, tasks, _variant) or [["  yours", *("-" for _ in tasks)]]
        section += _own([group for group in own if beside.row_for(group) is None], tasks, _other)
        lines += [[str(shots) if number == 0 else "", *line] for number, line in enumerate(section)]
    return lines


def _own(groups: Sequence[Group], tasks: Sequence[str], name: Callable[[Group], str]) -> list[list[str]]:
    """Return a line for each name that groups go by, and one of the differences where the paper has numbers."""
    lines = []
    for told in dict.fromkeys(map(name, groups)):
        mine = {group.task: group for group in groups if name(group) == told}
        lines.append([told, *(_result(mine.get(task)) for task in tasks)])
        points = [
            beside.difference(mine[task], beside.number_for(mine[task])) if task in mine else None for task in tasks
        ]
        if any(value is not None for value in points):
            lines.append(["  difference", *("" if value is None else f"{value:+.1f}" for value in points)])
    return lines


def _result(group: Group | None) -> str:
    if group is None:
        return "-"
    return percent(group.mean, group.std) + (f" {seeds_told(group)}" if group.missing else "")


def _variant(group: Group) -> str:
    """Return `  yours`, and what tells it from the paper's row."""
    held = paper().settings(group.method).get("steps")
    steps = [f"steps={group.steps}"] if group.steps and group.steps != held else []
    extra = [group.label.removeprefix(group.method).strip(" ()"), *steps]
    told = ", ".join(text for text in extra if text)
    return f"  yours: {told}" if told else "  yours"


def _other(group: Group) -> str:
    """Return the whole name of a group that no row of the paper stands for."""
    objective = [text for text in (group.objective, group.loss) if text not in (paper().objective, "cross_entropy")]
    steps = [f"steps={group.steps}"] if group.steps else []
    return f"yours: {group.label}, {', '.join([group.model, *objective, *steps])}"


def _cells(row: Row, groups: Sequence[Group]) -> Iterable[dict[str, Any]]:
    """Return a record for each number of a row and each group beside it; a number without a group has no test."""
    told = f"{row.label}, k={row.shots}"
    for task in paper().tasks:
        mine = [group for group in groups if group.task == task and beside.row_for(group) is row]
        yield from ({"row": told, **record(group)} for group in mine)
        if not mine and task in row.numbers:
            number = row.numbers[task]
            empty = {"task": task, "shots": row.shots, "method": row.method, "loss": row.loss, "n": 0}
            yield {"row": told, **empty, **number.record()}
