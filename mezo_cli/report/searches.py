"""The searches of `mezo tune` among the runs of a report: what was searched, and what each trial came to."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mezo_cli.config.search_ranges import Range, parse_ranges
from mezo_cli.console import relative_path
from mezo_cli.errors import UserError, one_line
from mezo_cli.report.read import Entry
from mezo_cli.runs import sweep_record
from mezo_cli.training import verdict


@dataclass(frozen=True)
class Search:
    """A search.

    Attributes:
        name: its folder.
        goal: `loss`, or the name of the metric.
        ranges: what was searched.
        trials: a row per trial: number (from 1), a column per searched key, end (as `verdict.end_of` says it), score
            (of its best evaluation after step 0: the metric as a fraction, or the loss if that is the goal; nan before
            the first one), is_record (it has finished, and better than every trial before).
        locations: of their runs.
    """

    name: str
    goal: str
    ranges: Sequence[Range]
    trials: pd.DataFrame
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
    searches = []
    for folder, members in by_folder.items():
        try:
            record = sweep_record.read(folder) if sweep_record.exists(folder) else None
            if record is not None and record.tune is not None:
                jobs = [(job.number, members[job.directory]) for job in record.jobs or () if job.directory in members]
                searches.append(_search(relative_path(folder), record.tune.ranges, record.tune.goal, jobs))
        except UserError as error:
            warn(f"the search in {relative_path(folder)} is left out: {one_line(error)}")
    return searches


def _search(name: str, texts: Sequence[str], goal: str, jobs: Sequence[tuple[int, Entry]]) -> Search:
    first = jobs[0][1]
    ranges, column = parse_ranges(texts, first.config), "loss" if goal == "loss" else first.metric
    rows: list[dict[str, Any]] = []
    for number, entry in jobs:
        line = verdict.best_evaluation(entry.run, entry.config.steps, entry.metric, goal)
        values = {searched.key: entry.settings[searched.key] for searched in ranges}
        row = {
            "number": number + 1,
            **values,
            "end": verdict.end_of(entry.run),
            "score": float("nan"),
            "value": float("nan"),
        }
        if line is not None:  # `value` orders the trials: higher is better
            value = verdict.value_of(line, entry.metric, goal)
            row |= {"score": float(line[column]), "value": -value if goal == "loss" else value}
        rows.append(row)
    table = pd.DataFrame(rows)
    finished = table["value"].where(table["end"] == "finished")
    table["is_record"] = finished > finished.cummax().shift(fill_value=float("-inf")).ffill()
    return Search(name, column, ranges, table, [entry.location for _, entry in jobs])
