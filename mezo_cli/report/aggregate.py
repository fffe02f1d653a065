"""Aggregate runs by the paper's protocol, and find the paper's number for each group of runs.

The protocol: within a group, take the best dev score of each data seed over the grid; then the mean and the std over
the data seeds. Runs of the same data seed and the same point of the grid that differ in the run's own seed are
repetitions: their scores are averaged, dev and test alike, and they do not compete. A tie in dev goes to the lower
dev loss, then to the smaller lr. Test scores never decide.
"""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezo_cli.report.paper import Number, Row, paper
from mezo_cli.report.read import Entry, Scores
from mezo_cli.report.settings import (
    built_in_choice,
    flatten,
    format_setting,
    format_value,
    grid_settings,
    group_settings,
    is_zero_shot,
    method_name,
    objective_order,
    unusual_settings,
)

Point = tuple[tuple[str, Any], ...]  # of the grid: (key, value) pairs
PROMPT = ("template", "labels", "label_words")


@dataclass(frozen=True)
class Pick:
    """A point of the grid on one data seed, with its finished runs (one per run seed)."""

    point: Point
    entries: tuple[Entry, ...]

    @property
    def dev(self) -> float:
        """The mean dev score."""
        return statistics.fmean(scores.score for scores in self._scores("dev"))

    @property
    def dev_loss(self) -> float:
        """The mean dev loss, which decides a tie."""
        return statistics.fmean(scores.loss for scores in self._scores("dev"))

    @property
    def test(self) -> float | None:
        """The mean test score; None without a test split."""
        found = self._scores("test")
        return statistics.fmean(scores.score for scores in found) if len(found) == len(self.entries) else None

    @property
    def picked_start(self) -> bool:
        """Whether the result of one of its runs is that of step 0, the model before training."""
        return any(entry.picked_start for entry in self.entries)

    def _scores(self, split: str) -> list[Scores]:
        return [scores for entry in self.entries if (scores := getattr(entry, split)) is not None]


@dataclass
class Group:
    """Runs that differ only in their seeds and in the settings of the grid."""

    settings: Mapping[str, Any]  # that all its runs share
    entries: list[Entry]
    grid: list[Point] = field(default_factory=list)
    picks: dict[int, Pick] = field(default_factory=dict)  # data seed -> the best point
    troubles: list[str] = field(default_factory=list)  # missing and failed runs, one text each
    expected: frozenset[int] = frozenset()  # data seeds that should have a result
    ambiguous: bool = False  # whether another group has the same task, shots and label
    distinguishing: list[str] = field(default_factory=list)  # keys that differ from groups that look the same

    def __post_init__(self) -> None:
        config = self.entries[0].config
        self.config = config
        self.task, self.metric = config.task.name, config.task.metric
        self.objective, self.loss = config.objective.name, config.objective.loss
        self.model = Path(config.model.path).name
        self.method = method_name(config)
        self.demo = config.data.name == "demo"  # its rows are not those of the task
        self.zero_shot = is_zero_shot(config)
        self.shots: int | None = 0 if self.zero_shot else self.entries[0].shots
        self.steps = config.steps
        self.unusual = unusual_settings(config, paper().usual_settings(self.method))

    @property
    def label(self) -> str:
        """The method, with its unusual settings and those that distinguish it from similar groups."""
        keys = dict.fromkeys([*self.unusual, *self.distinguishing])
        values = flatten(self.config) | dict(self.settings)
        settings = [format_setting(key, values.get(key)) for key in keys]
        return f"{self.method} ({', '.join(settings)})" if settings else self.method

    @property
    def title(self) -> str:
        """Task, shots and label, for a note; with model, objective and steps if these three are ambiguous."""
        text = f"{self.task} {format_shots(self.shots)} {self.label}"
        more = f", {self.model} {self.objective} {self.loss}, steps={self.steps}"
        return text + (more if self.ambiguous else "")

    @property
    def dev(self) -> float | None:
        """The mean dev score over the data seeds."""
        return statistics.fmean(pick.dev for pick in self.picks.values()) if self.picks else None

    @property
    def tests(self) -> dict[int, float]:
        """The test score of each data seed that has one."""
        return {seed: pick.test for seed, pick in self.picks.items() if pick.test is not None}

    @property
    def mean(self) -> float | None:
        """The mean test score over the data seeds."""
        return statistics.fmean(self.tests.values()) if self.tests else None

    @property
    def std(self) -> float | None:
        """The population std (ddof 0) of the test score over the data seeds; None for fewer than two."""
        return statistics.pstdev(self.tests.values()) if len(self.tests) > 1 else None

    @property
    def at_start(self) -> list[int]:
        """The data seeds for which step 0 was picked, the model before training."""
        return sorted(seed for seed, pick in self.picks.items() if pick.picked_start)

    @property
    def verdicts(self) -> dict[str, int]:
        """What came of the training -> how many of its runs it came to, of those that say it."""
        return dict(Counter(entry.verdict for entry in self.entries if entry.verdict is not None))

    @property
    def missing(self) -> list[int]:
        """The data seeds without a result."""
        return sorted(self.expected - set(self.picks))

    @property
    def paper_row(self) -> Row | None:
        """The row of the paper with the same shots, method, model and objective; None if there is none."""
        same = self.model == paper().model and self.objective == paper().objective and self.metric == "accuracy"
        if not same or self.task not in paper().tasks or self.demo:
            return None
        return paper().row(self.shots, self.method, self.loss)

    @property
    def paper_number(self) -> Number | None:
        """The paper's number for this group; None if the paper has none."""
        return None if self.paper_row is None else self.paper_row.numbers.get(self.task)

    @property
    def difference(self) -> float | None:
        """The group's mean minus the paper's, in points; None if one of them is missing."""
        number = self.paper_number
        return None if number is None or self.mean is None else 100 * self.mean - number.mean


def format_shots(shots: int | None) -> str:
    """Return `k=16`, or `all` for all rows."""
    return "all" if shots is None else f"k={shots}"


def format_point(point: Point, grid: Iterable[Point]) -> str:
    """Return a point of a grid in short: the settings that vary in the grid, or its lr if none does."""
    values: dict[str, set[Any]] = defaultdict(set)
    for other in grid:
        for key, value in other:
            values[key].add(value)
    varying = [key for key, found in values.items() if len(found) > 1] or ["optimizer.lr"]
    return ", ".join(format_setting(key, value) for key, value in point if key in varying)


# --- groups ---


def group_runs(entries: Iterable[Entry]) -> list[Group]:
    """Sort runs into groups, in the order of the table: model, objective, task, shots, method, steps."""
    by_settings: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_settings[json.dumps(group_settings(entry), sort_keys=True, default=str)].append(entry)
    groups = [Group(group_settings(members[0]), members) for members in by_settings.values()]
    for group in groups:
        group.expected = _expected_seeds(group, groups)
        _pick_best(group)
    _distinguish(groups)
    return sorted(groups, key=_sort_key)


def _sort_key(group: Group) -> tuple[Any, ...]:
    tasks = paper().tasks
    task = (tasks.index(group.task) if group.task in tasks else len(tasks), group.task)
    shots = math.inf if group.shots is None else group.shots
    method = (paper().order(group.method), group.label)
    return (group.model, *objective_order(group.config), *task, shots, *method, group.steps)


def _expected_seeds(group: Group, groups: Sequence[Group]) -> frozenset[int]:
    """Return the data seeds that should have a result: all that were used for this task, these shots and this model.

    If they are among the paper's, all five of the paper. A zero-shot score is the same on every seed, so no seed is
    expected.
    """
    if group.zero_shot:
        return frozenset()

    def kind(one: Group) -> tuple[Any, ...]:
        return one.task, one.demo, one.shots, one.model

    alike = [one for one in groups if kind(one) == kind(group) and not one.zero_shot]
    used = frozenset(entry.data_seed for one in alike for entry in one.entries)
    return used | paper().seeds if group.shots is not None and used <= paper().seeds else used


def _distinguish(groups: Sequence[Group]) -> None:
    """Find the settings that distinguish groups which would look the same in the table."""
    alike: dict[tuple[Any, ...], list[Group]] = defaultdict(list)
    for group in groups:
        look = (group.task, group.shots, group.model, group.objective, group.loss, group.label, group.steps)
        alike[look].append(group)
    for same in alike.values():
        keys = sorted({key for group in same for key in group.settings})
        differing = [key for key in keys if len({json.dumps(g.settings.get(key), default=str) for g in same}) > 1]
        for group in same:
            group.distinguishing = differing
    names = Counter((group.task, group.shots, group.label) for group in groups)
    for group in groups:
        group.ambiguous = names[group.task, group.shots, group.label] > 1


# --- inside a group ---


def _pick_best(group: Group) -> None:
    """Pick the best point of each data seed, and note what is missing."""
    runs: dict[int, dict[Point, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for seed in sorted({entry.data_seed for entry in group.entries}):
        for entry in _current_runs(group, seed):
            runs[seed][tuple(grid_settings(entry.config).items())].append(entry)
    for seed, points in runs.items():
        finished = {point: [e for e in members if e.finished] for point, members in points.items()}
        candidates = [Pick(point, tuple(members)) for point, members in finished.items() if members]
        if candidates:
            group.picks[seed] = min(candidates, key=lambda c: (-c.dev, c.dev_loss, c.point))
    _note_missing(group, runs)


def _current_runs(group: Group, seed: int) -> list[Entry]:
    """Return the runs of a data seed that count: per point and run seed the newest, finished runs first.

    Runs on other data than the newest run's are left out, with a note: their scores are not comparable.
    """
    members = sorted((e for e in group.entries if e.data_seed == seed), key=lambda e: (e.start, e.location))
    fingerprints = [entry.data_fingerprint for entry in members if entry.data_fingerprint is not None]
    other = [entry for entry in members if entry.data_fingerprint not in (None, *fingerprints[-1:])]
    if other:
        group.troubles.append(
            f"seed {seed}: {len(other)} of {len(members)} runs had other data than the newest and are left out "
            f"({other[0].location}{' ...' if len(other) > 1 else ''})"
        )
    newest: dict[Any, Entry] = {}
    for entry in members:
        key = (tuple(grid_settings(entry.config).items()), entry.config.seed)
        if entry not in other and not (key in newest and newest[key].finished and not entry.finished):
            newest[key] = entry
    return list(newest.values())


def _note_missing(group: Group, runs: Mapping[int, Mapping[Point, Sequence[Entry]]]) -> None:
    """Note which seeds, and which points of the grid on the other seeds, have no result, and why."""
    absent = sorted(group.expected - set(runs))
    if absent:
        group.troubles.append(f"not run: {_format_seeds(absent)}")
    group.grid = sorted({point for points in runs.values() for point in points})
    for point in group.grid:
        prefix = f"{format_point(point, group.grid)}: " if len(group.grid) > 1 else ""
        skipped = [seed for seed, points in runs.items() if point not in points]
        if skipped and not group.zero_shot:
            group.troubles.append(f"{prefix}not run: {_format_seeds(skipped)}")
        for seed, points in runs.items():
            for entry in points.get(point, ()):
                if not entry.finished:
                    group.troubles.append(f"{prefix}seed {seed} {entry.trouble()}")


def _format_seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


# --- how a group differs from the paper's runs ---


def unlike_paper(group: Group) -> list[str]:
    """Return in what the group's set-up differs from that of the paper's row, one text each."""
    found = [] if group.zero_shot else [*_other_settings(group), *_outside_grid(group), *_other_seeds(group)]
    if _other_prompt(group):
        found.append("another prompt")
    if group.config.data.eval_limit is not None:
        found.append(f"tested on at most {group.config.data.eval_limit} rows")
    if group.zero_shot and group.config.data.shots is None and not group.settings["data.shots"]:
        found.append("tested on all rows, the paper on at most 1000")
    return found


def _other_settings(group: Group) -> list[str]:
    expected = paper().settings(group.method)
    if not expected:  # the paper gives none for LP
        return []
    given = flatten(group.config)
    other = {key: value for key, value in expected.items() if key in group.settings and given[key] != value}
    return [
        f"{format_setting(key, given[key])} not {format_value(value)}" for key, value in (other | group.unusual).items()
    ]


def _outside_grid(group: Group) -> list[str]:
    """Return the picked values that lie outside the paper's grid."""
    found = []
    for key, ends in paper().grid(group.method).items():
        picked = {float(value) for pick in group.picks.values() for name, value in pick.point if name == key}
        outside = sorted(value for value in picked if not min(ends) <= value <= max(ends))
        if outside:
            span = " to ".join(f"{end:g}" for end in ends)
            found.append(f"{', '.join(format_setting(key, value) for value in outside)} not {span}")
    return found


def _other_seeds(group: Group) -> list[str]:
    ours = set(group.tests)
    if ours == paper().seeds:
        return []
    if ours < paper().seeds:
        return [f"{len(ours)} of {len(paper().seeds)} data seeds"]
    return [f"data seeds {', '.join(map(str, sorted(ours)))}"]


def _other_prompt(group: Group) -> bool:
    """Return whether the prompt differs from that of the built-in task of the same name."""
    built_in = built_in_choice("task", group.task)
    return any(getattr(group.config.task, key) != built_in[key] for key in PROMPT)
