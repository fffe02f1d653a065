"""The searches of `mezo tune` among the runs of a report: what each trial came to, over each searched number."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from mezo_cli.config.search_ranges import parse_ranges
from mezo_cli.console import relative_path
from mezo_cli.errors import UserError, one_line
from mezo_cli.report.figures import Line
from mezo_cli.report.group_figures import Panel
from mezo_cli.report.read import Entry
from mezo_cli.report.settings import scale
from mezo_cli.runs import sweep_record
from mezo_cli.training import verdict

Trials = Mapping[int, Entry]  # by their numbers, from 1


def read_searches(entries: Sequence[Entry], warn: Callable[[str], None]) -> dict[Path, Trials]:
    """Return the folder of each search whose trials are among some runs -> these trials.

    Args:
        entries: the runs.
        warn: called for each folder whose sweep.json is damaged; its search is left out.
    """
    by_folder: dict[Path, dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        by_folder[entry.run.path.parent][entry.run.path.name] = entry
    searches: dict[Path, Trials] = {}
    for folder, runs in by_folder.items():
        try:
            record = sweep_record.read(folder) if sweep_record.exists(folder) else None
        except UserError as error:
            warn(f"the search in {relative_path(folder)} is left out: {one_line(error)}")
            continue
        if record is not None and record.tune is not None:
            jobs = record.jobs or ()
            searches[folder] = {job.number + 1: runs[job.directory] for job in jobs if job.directory in runs}
    return searches


def search_panels(folder: Path, trials: Trials) -> list[Panel]:
    """Return one panel per searched number: the score of every trial over it, a line of points for each way to end."""
    tune, first = sweep_record.read(folder).tune, next(iter(trials.values()))
    assert tune is not None
    ranges, goal = parse_ranges(tune.ranges, first.config), "loss" if tune.goal == "loss" else first.metric
    rows = []
    for number, entry in trials.items():
        line = verdict.best_evaluation(entry.run, entry.config.steps, entry.metric, tune.goal)
        if line is not None:
            values = {searched.key: entry.settings[searched.key] for searched in ranges}
            value = (-1 if goal == "loss" else 1) * verdict.value_of(line, entry.metric, tune.goal)
            score = scale(goal) * float(line[goal])
            rows.append({"end": verdict.end_of(entry.run), "mean": score, "trial": number, "value": value, **values})
    table = pd.DataFrame(rows, columns=["end", "mean", "trial", "value", *(searched.key for searched in ranges)])
    finished = table[table["end"] == "finished"]
    table.loc[finished.nlargest(1, "value").index, "end"] = "the best"
    what = "lowest loss" if goal == "loss" else goal
    note = f"The {what} on dev after step 0 of each of {len(trials)} trials; a trial before its first has none."
    panels = []
    for searched in ranges:
        lines = [Line(str(end), part.set_index(searched.key)[["mean", "trial"]]) for end, part in table.groupby("end")]
        title = f"{relative_path(folder)}: {goal} against {searched.key}"
        panels.append(Panel(title, goal, lines, note, searched.key, searched.is_log))
    return [panel for panel in panels if panel.lines]
