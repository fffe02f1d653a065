"""The paper's protocol: inside a group of runs the best dev score of each data seed, then mean and std over the seeds.

Runs of one data seed and one point of the grid that differ in the run's own seed are repetitions: they are averaged,
dev and test alike, and never competed for. Ties in dev go to the lower dev loss, then to the smaller lr: never to test.
"""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezo_cli.compare import methods
from mezo_cli.compare.collect import Entry, Scores
from mezo_cli.compare.paper import paper

Point = tuple[tuple[str, Any], ...]  # of the grid: (key, value) pairs


@dataclass(frozen=True)
class Pick:
    """A point of the grid on one data seed, with the finished runs that stand for it (one a run seed)."""

    point: Point
    entries: tuple[Entry, ...]

    @property
    def dev(self) -> float:
        """The dev score."""
        return statistics.fmean(scores.score for scores in self._all("dev"))

    @property
    def dev_loss(self) -> float:
        """The dev loss, which decides a tie."""
        return statistics.fmean(scores.loss for scores in self._all("dev"))

    @property
    def test(self) -> float | None:
        """The test score, None without a test split."""
        seen = self._all("test")
        return statistics.fmean(scores.score for scores in seen) if len(seen) == len(self.entries) else None

    def _all(self, split: str) -> list[Scores]:
        return [scores for entry in self.entries if (scores := getattr(entry, split)) is not None]


@dataclass
class Group:
    """Runs that differ in their seeds and in the grid only."""

    recipe: Mapping[str, Any]
    entries: list[Entry]
    grid: list[Point] = field(default_factory=list)
    picks: dict[int, Pick] = field(default_factory=dict)  # data seed -> what was picked
    troubles: list[str] = field(default_factory=list)  # missing and failed, in words
    expected: frozenset[int] = frozenset()  # data seeds that ought to be there
    namesakes: bool = False  # whether task, shots and method are another group's too
    apart: list[str] = field(default_factory=list)  # keys that tell it from groups that look the same

    def __post_init__(self) -> None:
        config = self.entries[0].config
        self.task, self.metric = config.task.name, config.task.metric
        self.objective, self.loss = config.objective.name, config.objective.loss
        self.model = Path(config.model.path).name
        self.method = methods.method(config)
        self.demo = config.data.name == "demo"  # whose task bears another's name
        self.zero_shot = methods.is_zero_shot(config)
        self.shots: int | None = 0 if self.zero_shot else self.entries[0].shots
        self.steps = config.steps
        self.unusual = methods.unusual(config, paper().usual(self.method))

    @property
    def label(self) -> str:
        """The method, with whatever is unusual about it, or tells it from its like."""
        keys = dict.fromkeys([*self.unusual, *self.apart])
        settings = methods.flat(self.entries[0].config) | dict(self.recipe)
        told = [methods.told(key, settings.get(key)) for key in keys]
        return f"{self.method} ({', '.join(told)})" if told else self.method

    @property
    def title(self) -> str:
        """Task, shots and method, for a note; and all else of its look where another group has the same."""
        told = f"{self.task} {shots_told(self.shots)} {self.label}"
        more = f", {self.model} {self.objective} {self.loss}, steps={self.steps}"
        return told + (more if self.namesakes else "")

    @property
    def dev(self) -> float | None:
        """The mean dev score."""
        return statistics.fmean(pick.dev for pick in self.picks.values()) if self.picks else None

    @property
    def tests(self) -> dict[int, float]:
        """The test score of each data seed that has one."""
        return {seed: pick.test for seed, pick in self.picks.items() if pick.test is not None}

    @property
    def mean(self) -> float | None:
        """The mean of test over the data seeds."""
        return statistics.fmean(self.tests.values()) if self.tests else None

    @property
    def std(self) -> float | None:
        """The population std (ddof 0) of test over the data seeds; None for fewer than two."""
        return statistics.pstdev(self.tests.values()) if len(self.tests) > 1 else None

    @property
    def missing(self) -> list[int]:
        """The data seeds without a result."""
        return sorted(self.expected - set(self.picks))


def shots_told(shots: int | None) -> str:
    """Return `k=16`, or `all` for all rows."""
    return "all" if shots is None else f"k={shots}"


def gather(entries: Iterable[Entry]) -> list[Group]:
    """Sort runs into groups, in the order of the table: model, objective, task, shots, method, steps."""
    by_recipe: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_recipe[json.dumps(methods.recipe(entry), sort_keys=True, default=str)].append(entry)
    groups = [Group(methods.recipe(members[0]), members) for members in by_recipe.values()]
    for group in groups:
        group.expected = _expected(group, groups)
        _pick(group)
    _tell_apart(groups)
    return sorted(groups, key=_order)


def _order(group: Group) -> tuple[Any, ...]:
    tasks = paper().tasks
    task = (tasks.index(group.task) if group.task in tasks else len(tasks), group.task)
    shots = math.inf if group.shots is None else group.shots
    named = (paper().order(group.method), group.label)
    return (group.model, *methods.place(group.entries[0].config), *task, shots, *named, group.steps)


def _expected(group: Group, groups: Sequence[Group]) -> frozenset[int]:
    """Return the data seeds that ought to be there: all that were used for this task, these shots and this model.

    Where they are the paper's, all five of the paper's. A zero-shot score is the same on every seed: none is missing.
    """
    if group.zero_shot:
        return frozenset()
    alike = [
        g for g in groups if (g.task, g.demo, g.shots, g.model) == (group.task, group.demo, group.shots, group.model)
    ]
    used = frozenset(entry.data_seed for g in alike if not g.zero_shot for entry in g.entries)
    return used | paper().seeds if group.shots is not None and used <= paper().seeds else used


def _tell_apart(groups: Sequence[Group]) -> None:
    """Find the settings by which groups differ that would look the same in the table."""
    alike: dict[tuple[Any, ...], list[Group]] = defaultdict(list)
    for group in groups:
        look = (group.task, group.shots, group.model, group.objective, group.loss, group.label, group.steps)
        alike[look].append(group)
    for same in alike.values():
        keys = sorted({key for group in same for key in group.recipe})
        differing = [key for key in keys if len({json.dumps(g.recipe.get(key), default=str) for g in same}) > 1]
        for group in same:
            group.apart = differing
    names = Counter((group.task, group.shots, group.label) for group in groups)
    for group in groups:
        group.namesakes = names[group.task, group.shots, group.label] > 1


# --- inside a group ---


def _pick(group: Group) -> None:
    """Pick the best point of each data seed, and tell what is missing."""
    standing: dict[int, dict[Point, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for seed in sorted({entry.data_seed for entry in group.entries}):
        for entry in _standing(group, seed):
            standing[seed][tuple(methods.setting(entry.config).items())].append(entry)
    for seed, points in standing.items():
        finished = {point: [e for e in members if e.finished] for point, members in points.items()}
        candidates = [Pick(point, tuple(members)) for point, members in finished.items() if members]
        if candidates:
            group.picks[seed] = min(candidates, key=lambda c: (-c.dev, c.dev_loss, c.point))
    _tell_missing(group, standing)


def _standing(group: Group, seed: int) -> list[Entry]:
    """Return the runs that stand for a data seed: of the same point and run seed the newest, a finished one first.

    Runs on other data than the newest has are left out, and told: their scores could not be held against each other.
    """
    members = sorted((e for e in group.entries if e.data_seed == seed), key=lambda e: (e.start, e.where))
    prints = [entry.fingerprint for entry in members if entry.fingerprint is not None]
    other = [entry for entry in members if entry.fingerprint not in (None, *prints[-1:])]
    if other:
        group.troubles.append(
            f"seed {seed}: {len(other)} of {len(members)} runs had other data than the newest and are left out "
            f"({other[0].where}{' ...' if len(other) > 1 else ''})"
        )
    newest: dict[Any, Entry] = {}
    for entry in members:
        key = (tuple(methods.setting(entry.config).items()), entry.config.seed)
        if entry not in other and not (key in newest and newest[key].finished and not entry.finished):
            newest[key] = entry
    return list(newest.values())


def _tell_missing(group: Group, standing: Mapping[int, Mapping[Point, Sequence[Entry]]]) -> None:
    """Tell which seeds, and which points of the grid on the other seeds, have no result, and why."""
    absent = sorted(group.expected - set(standing))
    if absent:
        group.troubles.append(f"not run: {_seeds(absent)}")
    group.grid = sorted({point for points in standing.values() for point in points})
    for point in group.grid:
        told = f"{told_point(point, group.grid)}: " if len(group.grid) > 1 else ""
        skipped = [seed for seed, points in standing.items() if point not in points]
        if skipped and not group.zero_shot:
            group.troubles.append(f"{told}not run: {_seeds(skipped)}")
        for seed, points in standing.items():
            for entry in points.get(point, ()):
                if not entry.finished:
                    group.troubles.append(f"{told}seed {seed} {entry.trouble()}")


def told_point(point: Point, grid: Iterable[Point]) -> str:
    """Return a point of a grid in short, by what varies in the grid; by its lr where nothing does."""
    values: dict[str, set[Any]] = defaultdict(set)
    for other in grid:
        for key, value in other:
            values[key].add(value)
    varying = [key for key, seen in values.items() if len(seen) > 1] or ["optimizer.lr"]
    return ", ".join(methods.told(key, value) for key, value in point if key in varying)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
