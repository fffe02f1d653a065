"""Groups of runs: the paper's protocol over the numbers of the runs, and the paper's number for each group.

The protocol: within a group, take the point of the grid with the best dev score of each data seed, by the rule of
`Config.rank`; then the mean and the std over all runs at these points. Runs on the same rows have one data seed. Those
that differ in their own seed alone do not compete: the point's score is their mean, and each counts. A point of which
most runs diverged is picked only where all are such. Test scores never decide.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from mezo_cli.config.registry import LOSSES, OBJECTIVES
from mezo_cli.data.sampling import TEST_ROWS
from mezo_cli.report.entries import Entry
from mezo_cli.report.paper import paper_of
from mezo_cli.report.settings import (
    Point,
    default_settings,
    differing_keys,
    format_setting,
    format_value,
    is_zero_shot,
    matches,
    method_name,
    unusual_settings,
)

PROMPT = ("task.template", "task.labels", "task.label_words")
SEEDS = attrgetter("data_seed", "config.seed", "seeds")  # of a run
WITHOUT_GAIN = {"not_improved", "within_noise", "worse", "diverged"}  # verdicts


class Group:
    """Runs that differ only in their seeds and in the settings of the grid."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries, self.settings, self.config = entries, entries[0].common, entries[0].config
        config = self.config
        self.task, self.model, self.metric = config.task.name, entries[0].model, config.shown_metric
        self.objective, self.loss, self.method = config.objective.name, config.objective.loss, method_name(config)
        self.demo = config.data.name == "demo"  # its rows are not those of the task
        self.zero_shot, self.steps = is_zero_shot(config), config.steps
        self.shots: int | None = 0 if self.zero_shot else entries[0].shots
        self.paper = paper_of(self.model)
        self.unusual = unusual_settings(config, self.paper.usual_settings(self.method))  # key -> the paper's value
        self.expected: frozenset[int] = frozenset()  # data seeds that should have a result
        self.ambiguous = False  # whether another group has the same task, shots and label
        self.distinguishing: list[str] = []  # keys that differ from groups that look the same
        self.runs, self.troubles = _current_runs(entries)  # those that count, and why a run is missing or failed
        grid = sorted({run.point for run in self.runs})
        varying = [key for key, _ in grid[0] if len({dict(point)[key] for point in grid}) > 1] or ["optimizer.lr"]
        shown = {point: [format_setting(key, value) for key, value in point if key in varying] for point in grid}
        self.points = {point: ", ".join(settings) for point, settings in shown.items()}
        self.troubles += self._unfinished()
        self.picks = self._pick()  # data seed -> the finished runs at its best point, by their own seed
        self.results = [run for members in self.picks.values() for run in members]  # each a seed that counts
        scores = [(run.data_seed, run.score("test", self.metric)) for run in self.results]
        self.tests = [(seed, score) for seed, score in scores if score is not None]
        values = [score for _, score in self.tests]
        self.dev, self.before = (mean_score(self.results, split, self.metric) for split in ("dev", "test_before"))
        verdicts = Counter(run.verdict for run in self.results if run.verdict).most_common()
        self.verdict = ", ".join(f"{count} {word}" if len(verdicts) > 1 else word for word, count in verdicts)
        self.mean = float(np.mean(values)) if values else None
        self.std = float(np.std(values)) if len(values) > 1 else None  # the population's (ddof 0)
        self.at_start = [seed for seed, runs in self.picks.items() if any(run.picked_start for run in runs)]
        self.diverged = sum(run.verdict == "diverged" for run in self.results)  # each counts by its best step
        picked = Counter(self.points[runs[0].point] for runs in self.picks.values())
        self.chosen = [name for name, _ in picked.most_common()] if len(self.points) > 1 else []
        # The row of the paper with the same shots, method, model and objective, and its number.
        setup, self.paper_row = self.paper.tasks.get(self.task), None
        if setup and self.objective in setup["objectives"] and self.metric == setup["metric"] and not self.demo:
            self.paper_row = self.paper.row(self.model, self.shots, self.method, self.loss, self.task)
        self.paper_number = number = None if self.paper_row is None else self.paper_row.numbers.get(self.task)
        self.difference = None if number is None or self.mean is None else 100 * self.mean - number.mean  # in points

    @property
    def label(self) -> str:
        """The method, with its unusual settings and those that distinguish it from similar groups."""
        values = {**self.entries[0].settings, **self.settings}
        keys = dict.fromkeys([*self.unusual, *self.distinguishing])
        settings = [format_setting(key, values.get(key)) for key in keys]
        return f"{self.method} ({', '.join(settings)})" if settings else self.method

    @property
    def title(self) -> str:
        """Task, shots and label, for a note; with model, objective and steps if these three are ambiguous."""
        text = f"{self.task} {format_shots(self.shots)} {self.label}"
        return text + f", {self.model} {self.objective} {self.loss}, steps={self.steps}" * self.ambiguous

    @property
    def missing(self) -> list[int]:
        """The data seeds without a result."""
        return sorted(self.expected - set(self.picks))

    def edges(self) -> list[str]:
        """Return which picked values are the least or the greatest that their data seed tried, and where to go on.

        There is no direction where no point beats the untrained model, nor beyond a point that made it worse.
        """
        texts, verdicts = list[str](), {run.verdict for run in self.runs if run.finished}
        if len(self.points) > 1 and verdicts and verdicts <= WITHOUT_GAIN:
            return ["no point of the grid is better than the untrained model by its interval: no direction to go on"]
        for data_seed, picked in self.picks.items():
            if any(run.verdict in ("diverged", "worse") for run in picked):
                continue
            tried = [dict(run.point) for run in self.runs if run.data_seed == data_seed]
            for key, value in picked[0].point:
                values = [point[key] for point in tried]
                if min(values) < max(values) and value in (min(values), max(values)):
                    side, text = "below" if value == min(values) else "above", format_setting(key, value)
                    texts.append(f"{text} is at the edge of the grid: go on {side} {format_value(value)}")
        return list(dict.fromkeys(texts))

    def _unfinished(self) -> list[str]:
        runs = sorted(self.runs, key=lambda run: (run.point, run.data_seed, run.config.seed))
        starts = {point: f"{name}: " if len(self.points) > 1 else "" for point, name in self.points.items()}
        texts = [f"{starts[run.point]}seed {run.seeds} {run.trouble()}" for run in runs if not run.finished]
        tried = defaultdict(list)
        for (_, _, name), of_seed in groupby(sorted(runs, key=SEEDS), SEEDS):
            tried["; ".join(self.points[run.point] for run in of_seed)].append(f"seed {name}")
        if len(tried) > 1 and not self.zero_shot:
            places = " | ".join(f"{', '.join(names)} at {points}" for points, names in tried.items())
            texts.append(f"the seeds were not run on the same grid: {places}")
        return texts

    def _pick(self) -> dict[int, list[Entry]]:
        cells: dict[tuple[int, Point], list[Entry]] = defaultdict(list)
        for run in sorted((run for run in self.runs if run.finished), key=SEEDS):
            cells[run.data_seed, run.point].append(run)

        def rank(runs: Sequence[Entry]) -> tuple[Any, ...]:
            scores = {name: mean_score(runs, "dev", name) for name in (self.metric, "loss")}  # over the run seeds
            mostly_diverged = sum(run.verdict == "diverged" for run in runs) > len(runs) / 2
            return (mostly_diverged, *self.config.rank(scores), runs[0].point)

        best: dict[int, list[Entry]] = {}
        for runs in sorted(cells.values(), key=rank):
            best.setdefault(runs[0].data_seed, runs)
        return dict(sorted(best.items()))


def mean_score(runs: Sequence[Entry], split: str, metric: str) -> float | None:
    """Return the mean of a score over runs; None where one of them has none, or there is no run."""
    scores = [run.score(split, metric) for run in runs]
    numbers = [score for score in scores if score is not None]
    return float(np.mean(numbers)) if numbers and len(numbers) == len(scores) else None


def format_shots(shots: int | None, sign: str = "k=") -> str:
    """Return `k=16`, or `all` for all rows."""
    return "all" if shots is None else f"{sign}{shots}"


def _current_runs(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the runs that count: per data seed, point and run seed the newest, finished runs first.

    Runs on other data than the newest run of their data seed are left out and named: their scores are not comparable.
    """
    ordered = sorted(entries, key=lambda run: (str(run.info.get("start")), run.location))
    newest = {run.data_seed: run.data for run in ordered if run.data is not None}
    current = [run for run in ordered if run.data in (None, newest.get(run.data_seed))]
    counts, used = (Counter(run.data_seed for run in runs) for runs in (ordered, current))
    troubles = []
    for seed, others in sorted((counts - used).items()):
        first = next(run for run in ordered if run.data_seed == seed and run not in current)
        named = f"{first.location}{' ...' if others > 1 else ''}"
        troubles.append(f"seed {seed}: {others} of {counts[seed]} runs had other data than the newest: {named}")
    current.sort(key=lambda run: run.finished)
    return list({(run.data_seed, run.point, run.config.seed): run for run in current}.values()), troubles


def group_runs(entries: Iterable[Entry]) -> list[Group]:
    """Sort runs into groups, in the order of the table: model, objective, task, shots, method, steps."""
    entries, first, by_settings = list(entries), dict[str, int](), defaultdict[str, list[Entry]](list)
    for entry in sorted(entries, key=attrgetter("data_seed")):
        if entry.data is not None:  # with fixed files `data.seed`, which follows `seed`, has drawn nothing
            entry.data_seed = first.setdefault(entry.data, entry.data_seed)
    for entry in entries:
        by_settings[entry.group].append(entry)
    groups = [Group(members) for members in by_settings.values()]
    # Expected is each data seed that was used for the task, shots and model; if all are the paper's, all five of these.
    # A zero-shot score is the same on every seed.
    for same in _alike([group for group in groups if not group.zero_shot], "task", "demo", "shots", "model"):
        used, seeds = frozenset(entry.data_seed for one in same for entry in one.entries), same[0].paper.seeds
        for group in same:
            group.expected = used | seeds if group.shots is not None and used <= seeds else used
    for same in _alike(groups, "task", "shots", "model", "objective", "loss", "label", "steps"):
        keys = sorted(differing_keys([group.settings for group in same]))
        for group in same:
            group.distinguishing = keys
    for same in _alike(groups, "task", "shots", "label"):
        for group in same:
            group.ambiguous = len(same) > 1
    return sorted(groups, key=_sort_key)


def _alike(groups: Sequence[Group], *names: str) -> Collection[list[Group]]:
    found: dict[tuple[Any, ...], list[Group]] = defaultdict(list)
    for group in groups:
        found[attrgetter(*names)(group)].append(group)
    return found.values()


def _sort_key(group: Group) -> tuple[Any, ...]:
    tasks, methods = list(group.paper.tasks), list(dict.fromkeys(row.method for row in group.paper.rows))

    def place(names: Sequence[str], name: str) -> int:  # what a list has not comes last
        return names.index(name) if name in names else len(names)

    objective = (place(OBJECTIVES.names, group.objective), place(LOSSES.names, group.loss))
    shots = math.inf if group.shots is None else group.shots
    task = (place(tasks, group.task), group.task)
    return (group.model, *objective, *task, shots, place(methods, group.method), group.label, group.steps)


def unlike_paper(group: Group) -> list[str]:
    """Return in what the group's setup differs from that of the paper's row, one text each."""
    values, data, texts = group.entries[0].settings, group.config.data, []
    if not group.zero_shot:
        expected = group.paper.settings(group.method, group.loss)
        other = {key: value for key, value in expected.items() if key in group.settings and values[key] != value}
        differing = (other | group.unusual).items() if expected else ()  # the paper gives none for LP
        texts += [f"{format_setting(key, values[key])} not {format_value(usual)}" for key, usual in differing]
        for key, ends in group.paper.grid(group.method, group.loss, group.task).items():
            picked = sorted({float(dict(runs[0].point).get(key, ends[0])) for runs in group.picks.values()})
            outside = [format_setting(key, value) for value in picked if not min(ends) <= value <= max(ends)]
            texts += [f"{', '.join(outside)} not {' to '.join(map(format_value, ends))}"] * bool(outside)
        ours, seeds = set(dict(group.tests)), group.paper.seeds
        if ours < seeds:
            texts.append(f"{len(ours)} of {len(seeds)} data seeds")
        elif ours != seeds:
            texts.append(f"data seeds {', '.join(map(str, sorted(ours)))}")
    built_in, prompt = default_settings(group.config), (*PROMPT, f"task.{group.objective}.")
    if any(value != built_in.get(key) for key, value in values.items() if matches(key, prompt)):
        texts.append("another prompt")
    if data.eval_limit is not None and data.eval_limit < TEST_ROWS:
        texts.append(f"tested on at most {data.eval_limit} rows")
    if group.zero_shot and not (data.shots is not None or group.settings["data.shots"] or data.test_size):
        texts.append(f"tested on all rows, the paper on at most {TEST_ROWS}")
    return texts
