"""Curves of groups of runs: the metric on dev against forwards, its mean and spread over seeds; scores over a grid."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mezo_cli.report.aggregate import Group, Point, format_shots
from mezo_cli.report.details import RunDetails
from mezo_cli.report.paper import Number
from mezo_cli.report.series import CURVE_POINTS, thin_indices
from mezo_cli.report.settings import grid_settings


@dataclass(frozen=True)
class Line:
    """The metric on dev of a group, over its data seeds.

    Attributes:
        label: what distinguishes the group from the others of its panel.
        forwards: of a batch, at each evaluation.
        mean, std: of the metric (a fraction), over the runs evaluated there; the population std, 0 for one run.
        runs: how many runs were evaluated there.
        test, test_std: the group's test score, as in `mezo compare`.
        paper: the paper's number, in percent.
    """

    label: str
    forwards: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    runs: np.ndarray
    test: float | None
    test_std: float | None
    number: Number | None

    @property
    def paper(self) -> float | None:
        """The paper's mean, in percent."""
        return None if self.number is None else self.number.mean


@dataclass(frozen=True)
class Panel:
    """The lines of the groups on one task, which are drawn together."""

    task: str
    metric: str
    demo: bool
    lines: Sequence[Line]


@dataclass(frozen=True)
class HeatMap:
    """The best dev score (a fraction, mean over data seeds) at each point of a group's grid.

    Attributes:
        title: the group.
        columns, rows: (key, values) of the two settings that vary most; `rows` has one value where one setting varies.
        cells: (row value, column value) -> (mean, number of data seeds). Further settings are at their best.
    """

    title: str
    columns: tuple[str, list[Any]]
    rows: tuple[str, list[Any]]
    cells: Mapping[tuple[Any, Any], tuple[float, int]]

    @property
    def best(self) -> tuple[Any, Any]:
        """The cell with the highest mean."""
        return max(self.cells, key=lambda at: self.cells[at][0])


# --- curves ---


def panels(groups: Sequence[Group], details: Mapping[str, RunDetails]) -> list[Panel]:
    """Return one panel per task, metric and kind of data; groups that were never evaluated are left out.

    Args:
        groups: the groups of runs.
        details: the details of each run, by its location.
    """
    by_task: dict[tuple[str, str, bool], list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.task, group.metric, group.demo].append(group)
    found = []
    for key, members in by_task.items():
        lines = [line for group in members if (line := _line(group, _label(group, members), details)) is not None]
        if lines:
            found.append(Panel(*key, lines))
    return found


def _line(group: Group, label: str, details: Mapping[str, RunDetails]) -> Line | None:
    """Return the line of the runs that `compare` picks; of all runs as long as none has finished."""
    picked = [entry for pick in group.picks.values() for entry in pick.entries]
    runs = [details[entry.location] for entry in picked or group.entries if entry.location in details]
    scores: dict[int, list[float]] = defaultdict(list)  # step -> one score per run
    forwards: dict[int, list[int]] = defaultdict(list)
    for run in runs:
        dev = run.dev
        if dev is None:
            continue
        for at in thin_indices(len(dev.steps), CURVE_POINTS):
            step = dev.steps[at]
            scores[step].append(dev.scores[at])
            forwards[step].append(run.forwards(step))
    if not scores:
        return None
    steps = sorted(scores)
    return Line(
        label,
        forwards=np.array([statistics.fmean(forwards[step]) for step in steps]),
        mean=np.array([statistics.fmean(scores[step]) for step in steps]),
        std=np.array([statistics.pstdev(scores[step]) for step in steps]),
        runs=np.array([len(scores[step]) for step in steps]),
        test=group.mean,
        test_std=group.std,
        number=group.paper_number,
    )


def _label(group: Group, members: Sequence[Group]) -> str:
    """Return the group's label, with what else differs between the groups of its panel."""
    parts = {
        "model": lambda one: one.model,
        "objective": lambda one: one.objective,
        "loss": lambda one: one.loss,
        "shots": lambda one: format_shots(one.shots),
        "steps": lambda one: f"{one.steps:,} steps",
    }
    differing = [read for read in parts.values() if len({read(one) for one in members}) > 1]
    return ", ".join([group.label, *(read(group) for read in differing)])


# --- grids ---


def heat_maps(groups: Iterable[Group], trials: Collection[str] = ()) -> list[HeatMap]:
    """Return the heat map of every group whose finished runs lie at several points of the grid.

    Args:
        groups: the groups of runs.
        trials: the locations of runs that are left out: trials of a search lie at no grid.
    """
    return [found for group in groups if (found := _heat_map(group, trials)) is not None]


def _heat_map(group: Group, trials: Collection[str]) -> HeatMap | None:
    scores: dict[Point, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in group.entries:
        if entry.finished and entry.dev is not None and entry.location not in trials:
            scores[tuple(grid_settings(entry.config).items())][entry.data_seed].append(entry.dev.score)
    values = {
        key: sorted({dict(point)[key] for point in scores}) for key in dict.fromkeys(k for p in scores for k, _ in p)
    }
    varying = sorted((key for key in values if len(values[key]) > 1), key=lambda key: -len(values[key]))
    if not varying:
        return None
    across = "optimizer.lr" if "optimizer.lr" in varying else varying[0]
    others = [key for key in varying if key != across]
    down = others[0] if others else next((key for key in values if key != across), across)
    cells: dict[tuple[Any, Any], tuple[float, int]] = {}
    for point, by_seed in scores.items():
        given, mean = dict(point), statistics.fmean(statistics.fmean(found) for found in by_seed.values())
        at = given[down], given[across]
        if at not in cells or mean > cells[at][0]:
            cells[at] = mean, len(by_seed)
    return HeatMap(group.title, (across, values[across]), (down, values[down]), cells)
