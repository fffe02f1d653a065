"""The searches of `mezo tune` among the runs of a report: what was searched, and what each trial came to."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mezo_cli.config.search_ranges import Range, parse_ranges
from mezo_cli.console import relative_path
from mezo_cli.errors import UserError, one_line
from mezo_cli.report.read import Entry
from mezo_cli.report.settings import flatten
from mezo_cli.runs import sweep_record
from mezo_cli.training import trials


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: from 1, as `mezo tune` shows it.
        values: searched key -> value.
        end: as `trials.end_of` says it.
        step, score: of its best evaluation after step 0; the score is the metric (a fraction), or the loss if that is
            the goal. None before the first one.
        is_record: whether it has finished, and better than every trial before.
    """

    number: int
    values: Mapping[str, float]
    end: str
    step: int | None
    score: float | None
    is_record: bool


@dataclass(frozen=True)
class Search:
    """A search: its folder, its goal (`loss`, or the name of the metric), what was searched, and the trials in order.

    `locations` are those of their runs.
    """

    name: str
    goal: str
    ranges: Sequence[Range]
    trials: Sequence[Trial]
    locations: Sequence[str]


def read_searches(entries: Iterable[Entry], warn: Callable[[str], None]) -> list[Search]:
    """Return the searches whose trials are among some runs.

    Args:
        entries: the runs.
        warn: called for each folder whose sweep.json is damaged; its search is left out.
    """
    by_folder: dict[Path, dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        by_folder[entry.run.path.parent][entry.run.path.name] = entry
    found = []
    for folder, members in by_folder.items():
        try:
            record = sweep_record.read(folder) if sweep_record.exists(folder) else None
            if record is not None and record.tune is not None:
                jobs = [(job.number, members[job.directory]) for job in record.jobs or () if job.directory in members]
                found.append(_search(relative_path(folder), record.tune["ranges"], record.tune["goal"], jobs))
        except UserError as error:
            warn(f"the search in {relative_path(folder)} is left out: {one_line(error)}")
    return found


def _search(name: str, texts: Sequence[str], goal: str, jobs: Sequence[tuple[int, Entry]]) -> Search:
    made, best = [], float("-inf")
    first = jobs[0][1].config
    ranges = parse_ranges(texts, first)
    for number, entry in jobs:
        config, end = entry.config, trials.end_of(entry.run)
        values = {one.key: flatten(config)[one.key] for one in ranges}
        line = trials.best_evaluation(entry.run, config.steps, config.task.metric, goal)
        if line is None:
            made.append(Trial(number + 1, values, end, None, None, is_record=False))
            continue
        value = trials.value_of(line, config.task.metric, goal) * (-1 if goal == "loss" else 1)
        is_record = end == "finished" and value > best
        best = value if is_record else best
        score = float(line["loss" if goal == "loss" else config.task.metric])
        made.append(Trial(number + 1, values, end, line["step"], score, is_record))
    return Search(
        name, "loss" if goal == "loss" else first.task.metric, ranges, made, [entry.location for _, entry in jobs]
    )
