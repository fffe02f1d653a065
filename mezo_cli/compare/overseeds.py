"""Objectives and losses over several seeds: a row each, where every seed has a table of its own."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from mezo_cli.compare import methods
from mezo_cli.compare.collect import Scores
from mezo_cli.compare.facts import Facts
from mezo_cli.compare.groups import Group, gather, shots_told, told_point
from mezo_cli.compare.overview import percent
from mezo_cli.compare.sheet import Sheet

COLUMNS = ("objective", "method", "runs", "g = 0", "|g|", "train", "dev", "test", "one answer")


def over_seeds(runs: Sequence[Facts]) -> list[Sheet]:
    """Return a table for each task, model and shots with several seeds: means, and of test the population std.

    Finished runs that agree in all but their seeds make a row; `one answer` counts those that give every row one label.
    """
    by_path = {facts.entry.run.path: facts for facts in runs if facts.entry.finished}
    groups = gather(facts.entry for facts in by_path.values())
    sheets = []
    for common, members in groupby(sorted(groups, key=_common), key=_common):
        rows = [row for group in members for row in _rows(group, by_path)]
        if any(int(row[COLUMNS.index("runs")]) > 1 for row in rows):
            sheets.append(Sheet(f"{', '.join(common)}, over the seeds above", COLUMNS, rows, left=2))
    return sheets


def _common(group: Group) -> tuple[str, str, str]:
    return group.task, group.model, shots_told(group.shots)


def _rows(group: Group, by_path: Mapping[Path, Facts]) -> list[list[str]]:
    """Return a row for each point of a group's grid."""
    rows = []
    for point in group.grid:
        entries = [entry for entry in group.entries if tuple(methods.setting(entry.config).items()) == point]
        runs = [by_path[entry.run.path] for entry in entries]
        zeros = [facts.zero for facts in runs if facts.zero is not None]
        sizes = [facts.size[0] for facts in runs if facts.size is not None]
        tests = _accuracies([entry.test for entry in entries])
        rows.append(
            [
                f"{group.objective} {group.loss}",
                f"{group.label}, {told_point(point, group.grid)}",
                str(len(runs)),
                f"{statistics.fmean(zeros):.1%}" if zeros else "-",
                f"{statistics.fmean(sizes):.3g}" if sizes else "-",
                percent(_mean(_accuracies([entry.train for entry in entries]))),
                percent(_mean(_accuracies([entry.dev for entry in entries]))),
                percent(_mean(tests), statistics.pstdev(tests) if len(tests) > 1 else None),
                f"{sum(facts.one_answer for facts in runs)} of {len(runs)}",
            ]
        )
    return rows


def _accuracies(seen: Sequence[Scores | None]) -> list[float]:
    return [scores.accuracy for scores in seen if scores is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
