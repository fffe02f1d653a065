"""Groups of runs: the paper's protocol over the numbers of the runs, and the paper's number for each group.

The protocol: within a group, take the point of the grid with the best dev score of each data seed, by the rule of
`Config.rank`; then the mean and the std over all runs at these points. Runs that differ in their own seed alone do not
compete: the point's score is their mean, and each counts. A point of which most runs diverged is picked only where all
are such. Test scores never decide.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from mezo_cli.config.registry import LOSSES, OBJECTIVES
from mezo_cli.config.schema import Config
from mezo_cli.data.fewshot import TEST_ROWS
from mezo_cli.report.frame import Entry
from mezo_cli.report.paper import paper_of
from mezo_cli.report.settings import (
    default_settings,
    format_setting,
    format_value,
    is_zero_shot,
    matches,
    method_name,
    unusual_settings,
)

Point = tuple[tuple[str, Any], ...]  # of the grid: (key, value) pairs
PROMPT = ("task.template", "task.labels", "task.label_words")


class Group:
    """Runs that differ only in their seeds and in the settings of the grid.

    Args:
        entries: the runs.

    Attributes:
        settings: that all runs have in common.
        unusual: those of them that the paper's runs of the method do not have -> the paper's value.
        runs: a row per run that counts: data_seed, seed, point (its number in `grid`), finished, dev, dev_loss, test,
            at_start (step 0 was picked), diverged, entry.
        grid: the points at which there are runs, in order.
        picks: the best point per data seed (the index): point, dev, dev_loss, test, at_start, entries.
        results: the rows of `runs` that finished at the picked points, each a seed that counts.
        tests: the test score of each of these that has one; the index is the data seed.
        dev, mean, std: of dev and of test over the seeds; std is the population's (ddof 0). None: there is none.
        at_start: the data seeds for which step 0 was picked, the model before training.
        diverged: how many of the seeds diverged: each counts with the result of its best step.
        chosen: the picked values of what was searched, the most frequent first; empty where the grid is one point.
        verdicts: what came of the training -> how many of its runs it came to, of those that say it.
        paper_row: the row of the paper with the same shots, method, model and objective; None if there is none.
        paper_number: the paper's number for this group; None if the paper has none.
        difference: the group's mean minus the paper's, in points; None if one of them is missing.
        troubles: missing and failed runs, one text each.
        expected: data seeds that should have a result.
        ambiguous: whether another group has the same task, shots and label.
        distinguishing: keys that differ from groups that look the same.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries, self.settings, self.config = entries, entries[0].common, entries[0].config
        config = self.config
        self.task, self.model, self.metric = config.task.name, entries[0].model, config.shown_metric
        self.steps = config.steps
        self.objective, self.loss, self.method = config.objective.name, config.objective.loss, method_name(config)
        self.demo = config.data.name == "demo"  # its rows are not those of the task
        self.zero_shot = is_zero_shot(config)
        self.shots: int | None = 0 if self.zero_shot else entries[0].shots
        self.setup = (self.task, self.demo, self.shots, self.model)
        self.paper = paper_of(self.model)
        self.unusual = unusual_settings(config, self.paper.usual_settings(self.method))
        self.expected: frozenset[int] = frozenset()
        self.ambiguous, self.distinguishing = False, list[str]()
        self.runs, self.troubles = _current_runs(entries, self.metric)
        self.grid: list[Point] = sorted(set(self.runs.point))
        self.runs["point"] = self.runs.point.map({point: number for number, point in enumerate(self.grid)})
        self.picks = _pick_best(self.runs, self.config, self.metric)
        picked = self.runs.data_seed.map(self.picks.point)
        self.results = self.runs[self.runs.finished & (self.runs.point == picked)].sort_values(["data_seed", "seed"])
        self.tests: pd.Series = self.results.set_index("data_seed").test.dropna()
        self.dev = None if self.results.empty else float(self.results.dev.mean())
        self.mean = None if self.tests.empty else float(self.tests.mean())
        self.std = float(self.tests.std(ddof=0)) if len(self.tests) > 1 else None
        self.at_start = list(map(int, self.picks.index[self.picks.at_start.astype(bool)]))
        self.diverged = int(self.results.diverged.sum())
        points = format_points(self.grid)
        self.chosen = [points[at] for at, _ in Counter(self.picks.point).most_common()] if len(self.grid) > 1 else []
        self.verdicts = dict(Counter(entry.verdict for entry in self.entries if entry.verdict is not None))
        setup, self.paper_row = self.paper.tasks.get(self.task), None
        if setup and self.objective in setup["objectives"] and self.metric == setup["metric"] and not self.demo:
            self.paper_row = self.paper.row(self.model, self.shots, self.method, self.loss, self.task)
        self.paper_number = None if self.paper_row is None else self.paper_row.numbers.get(self.task)
        number, mean = self.paper_number, self.mean
        self.difference = None if number is None or mean is None else 100 * mean - number.mean

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
        more = f", {self.model} {self.objective} {self.loss}, steps={self.steps}"
        return text + (more if self.ambiguous else "")

    @property
    def missing(self) -> list[int]:
        """The data seeds without a result."""
        return sorted(self.expected - set(self.picks.index))

    def missing_seeds(self) -> list[str]:
        """Return which of the expected data seeds were not run, as a note."""
        absent = sorted(self.expected - set(self.runs.data_seed))
        return [f"not run: seed{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"] * bool(absent)

    def note_troubles(self) -> None:
        """Note which runs have no result, and which seeds were run at other points of the grid than the rest."""
        points, tried = format_points(self.grid), defaultdict(list)
        seeds = zip(self.runs.seed, self.runs.data_seed, strict=True)
        names = [f"seed {seed}" + ("" if seed == of_data else f" (data {of_data})") for seed, of_data in seeds]
        runs = self.runs.assign(name=names).sort_values(["point", "data_seed", "seed"])
        for run in runs[~runs.finished].itertuples():
            start = f"{points[run.point]}: " if len(points) > 1 else ""
            self.troubles.append(f"{start}{run.name} {run.entry.trouble()}")
        for _, members in runs.groupby(["data_seed", "seed"]):
            tried["; ".join(points[at] for at in sorted(members.point))].append(members.name.iloc[0])
        if len(tried) > 1 and not self.zero_shot:
            texts = " | ".join(f"{', '.join(names)} at {places}" for places, names in tried.items())
            self.troubles.append(f"the seeds were not run on the same grid: {texts}")

    def edges(self) -> list[str]:
        """Return which picked values are the least or the greatest that their data seed tried, and where to go on."""
        texts = []
        for data_seed, picked in self.picks.point.items():
            tried = [dict(self.grid[point]) for point in self.runs.point[self.runs.data_seed == data_seed]]
            for key, value in self.grid[picked]:
                values = [point[key] for point in tried]
                if min(values) < max(values) and value in (min(values), max(values)):
                    side, text = "below" if value == min(values) else "above", format_setting(key, value)
                    texts.append(f"{text} is at the edge of the grid: go on {side} {format_value(value)}")
        return list(dict.fromkeys(texts))


def format_shots(shots: int | None, sign: str = "k=") -> str:
    """Return `k=16`, or `all` for all rows."""
    return "all" if shots is None else f"{sign}{shots}"


def format_points(grid: Sequence[Point]) -> list[str]:
    """Return each point of a grid in short: the settings that vary in the grid, or its lr if none does."""
    varying = [key for key, _ in grid[0] if len({dict(point)[key] for point in grid}) > 1] if grid else []
    shown = varying or ["optimizer.lr"]
    return [", ".join(format_setting(key, value) for key, value in point if key in shown) for point in grid]


# --- inside a group ---


def _current_runs(entries: Sequence[Entry], metric: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the runs that count: per data seed, point and run seed the newest, finished runs first.

    Runs on other data than the newest run of their data seed are left out and named: their scores are not comparable.
    """
    columns = {
        "data_seed": [entry.data_seed for entry in entries],
        "seed": [entry.config.seed for entry in entries],
        "point": [tuple(entry.point.items()) for entry in entries],
        "finished": [entry.finished for entry in entries],
        **{name: [entry.score(name, metric) for entry in entries] for name in ("dev", "test")},
        "dev_loss": [entry.score("dev", "loss") for entry in entries],
        "at_start": [entry.picked_start for entry in entries],
        "diverged": [entry.verdict == "diverged" for entry in entries],
        "order": [(str(entry.info.get("start")), entry.location) for entry in entries],
        "data": [entry.info.get("data_fingerprint") for entry in entries],
        "entry": list(entries),
    }
    runs = pd.DataFrame(columns).astype({"dev": float, "test": float, "dev_loss": float}).sort_values("order")
    newest = runs.dropna(subset="data").groupby("data_seed").data.last()
    other = runs.data.notna() & (runs.data != runs.data_seed.map(newest))
    troubles = []
    for seed, members in runs[other].groupby("data_seed"):
        count = (runs.data_seed == seed).sum()
        named = f"{members.entry.iloc[0].location}{' ...' if len(members) > 1 else ''}"
        troubles.append(f"seed {seed}: {len(members)} of {count} runs had other data than the newest: {named}")
    runs = runs[~other].sort_values("finished", kind="stable")
    return runs.drop_duplicates(["data_seed", "point", "seed"], keep="last"), troubles


def _pick_best(runs: pd.DataFrame, config: Config, metric: str) -> pd.DataFrame:
    """Return the best point of each data seed among the finished runs; a point has the means over its run seeds."""
    points = runs[runs.finished].groupby(["data_seed", "point"])
    scores = points[["dev", "dev_loss", "test"]].mean()
    scores["test"] = scores.test.where(points.test.count() == points.size())  # none if a run lacks it
    scores["at_start"] = points.at_start.any()
    scores["diverged"] = points.diverged.mean() > 0.5
    scores["entries"] = points.entry.agg(list)

    def rank(row: Any) -> tuple[Any, ...]:
        return (row.diverged, *config.rank({metric: row.dev, "loss": row.dev_loss}), row.point)

    rows = scores.reset_index()
    order = sorted(rows.index, key=lambda number: rank(rows.loc[number]))
    return rows.loc[order].drop_duplicates("data_seed").set_index("data_seed").sort_index()


# --- groups beside each other ---


def group_runs(entries: Iterable[Entry]) -> list[Group]:
    """Sort runs into groups, in the order of the table: model, objective, task, shots, method, steps."""
    by_settings: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_settings[entry.group].append(entry)
    groups = [Group(members) for members in by_settings.values()]
    for group in groups:
        group.expected = _expected_seeds(group, groups)
        group.note_troubles()
    _distinguish(groups)
    return sorted(groups, key=_sort_key)


def _sort_key(group: Group) -> tuple[Any, ...]:
    tasks, methods = list(group.paper.tasks), list(dict.fromkeys(row.method for row in group.paper.rows))

    def place(names: Sequence[str], name: str) -> int:  # what a list has not comes last
        return names.index(name) if name in names else len(names)

    objective = (place(OBJECTIVES.names, group.objective), place(LOSSES.names, group.loss))
    shots = math.inf if group.shots is None else group.shots
    task = (place(tasks, group.task), group.task)
    return (group.model, *objective, *task, shots, place(methods, group.method), group.label, group.steps)


def _expected_seeds(group: Group, groups: Sequence[Group]) -> frozenset[int]:
    """Return the data seeds that should have a result: all that were used for this task, these shots and this model.

    If they are among the paper's, all five of the paper. A zero-shot score is the same on every seed, so no seed is
    expected.
    """
    alike = [one for one in groups if one.setup == group.setup and not one.zero_shot and not group.zero_shot]
    used, seeds = frozenset(entry.data_seed for one in alike for entry in one.entries), group.paper.seeds
    return used | seeds if group.shots is not None and alike and used <= seeds else used


def _distinguish(groups: Sequence[Group]) -> None:
    """Find the settings that distinguish groups which would look the same in the table."""
    alike: dict[tuple[Any, ...], list[Group]] = defaultdict(list)
    for group in groups:
        look = (group.task, group.shots, group.model, group.objective, group.loss, group.label, group.steps)
        alike[look].append(group)
    for same in alike.values():
        texts = pd.DataFrame([{key: json.dumps(v, default=str) for key, v in g.settings.items()} for g in same])
        for group in same:
            group.distinguishing = sorted(texts.columns[texts.nunique(dropna=False) > 1])
    names = Counter((group.task, group.shots, group.label) for group in groups)
    for group in groups:
        group.ambiguous = names[group.task, group.shots, group.label] > 1


# --- how a group differs from the paper's runs ---


def unlike_paper(group: Group) -> list[str]:
    """Return in what the group's setup differs from that of the paper's row, one text each."""
    values, data, texts = group.entries[0].settings, group.config.data, []
    if not group.zero_shot:
        expected = group.paper.settings(group.method, group.loss)
        other = {key: value for key, value in expected.items() if key in group.settings and values[key] != value}
        differing = (other | group.unusual).items() if expected else ()  # the paper gives none for LP
        texts += [f"{format_setting(key, values[key])} not {format_value(usual)}" for key, usual in differing]
        for key, ends in group.paper.grid(group.method, group.loss, group.task).items():
            picked = sorted({float(dict(group.grid[number]).get(key, ends[0])) for number in group.picks.point})
            outside = [format_setting(key, value) for value in picked if not min(ends) <= value <= max(ends)]
            texts += [f"{', '.join(outside)} not {' to '.join(map(format_value, ends))}"] * bool(outside)
        ours, seeds = set(group.tests.index), group.paper.seeds
        if ours < seeds:
            texts.append(f"{len(ours)} of {len(seeds)} data seeds")
        elif ours != seeds:
            texts.append(f"data seeds {', '.join(map(str, sorted(ours)))}")
    built_in = default_settings(group.config)
    prompt = [key for key in values if matches(key, (*PROMPT, f"task.{group.objective}."))]
    if any(values[key] != built_in.get(key) for key in prompt):
        texts.append("another prompt")
    if data.eval_limit is not None and data.eval_limit < TEST_ROWS:
        texts.append(f"tested on at most {data.eval_limit} rows")
    if group.zero_shot and not (data.shots is not None or group.settings["data.shots"] or data.test_size):
        texts.append(f"tested on all rows, the paper on at most {TEST_ROWS}")
    return texts
