"""Read the runs under some folders: the settings of each, how it ended, its scores."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Config, data_dir
from mezo_cli.config.stored import read_config
from mezo_cli.console import relative_path
from mezo_cli.errors import UserError, join, one_line
from mezo_cli.report.settings import (
    GRID,
    IN_OTHER_COLUMNS,
    LIMIT,
    WITHOUT_EFFECT,
    flatten,
    is_zero_shot,
    leave_out,
    matches,
    unused,
)
from mezo_cli.runs import Run, find_runs, trajectory
from mezo_cli.runs.scores import metrics_of, picked_start

FEW_SHOT_FOLDER = re.compile(r"(\d+)-(\d+)")  # LM-BFF's name of a few-shot folder: shots and data seed


@dataclass(frozen=True)
class Entry:
    """One run. `scores` are those of its best checkpoint: split (dev, train, test) -> metric or `loss` -> value."""

    run: Run
    config: Config
    status: str
    error: str | None
    start: str
    data_fingerprint: str | None
    steps_done: int
    summary: Mapping[str, Any]  # summary.json; empty until the run has finished
    scores: Mapping[str, Mapping[str, float]]

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Every setting by its dotted key."""
        return flatten(self.config)

    @property
    def location(self) -> str:
        """The run directory, relative to the working directory if it lies below it."""
        return relative_path(self.run.path)

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return self.status == "finished"

    @property
    def metric(self) -> str:
        """The metric by which the best checkpoint is chosen."""
        return self.config.chosen_metric

    def score(self, split: str, metric: str | None = None) -> float | None:
        """Return a metric (`self.metric` if not given) of the best checkpoint on a split; None where there is none."""
        return self.scores.get(split, {}).get(metric or self.metric)

    @property
    def shots(self) -> int | None:
        """Training rows per label; None for all rows."""
        match = few_shot_folder(self.config)
        return self.config.data.shots if match is None else int(match[1])

    @property
    def data_seed(self) -> int:
        """The seed that the training rows were drawn with."""
        match = few_shot_folder(self.config)
        return self.config.data_seed if match is None else int(match[2])

    @property
    def verdict(self) -> str | None:
        """What came of the training: improved, not_improved or diverged; None where summary.json does not say it."""
        return self.summary.get("verdict")

    @property
    def picked_start(self) -> bool:
        """Whether the result is that of step 0, the model before training, although steps were taken."""
        return picked_start(self.summary)

    def grid_settings(self) -> dict[str, Any]:
        """Return the run's point of the grid."""
        excluded = unused(self.config)
        return {key: value for key, value in self.settings.items() if key in GRID and not matches(key, excluded)}

    def group_settings(self) -> dict[str, Any]:
        """Return the settings that all runs of a group have in common: those that have an effect, without the grid."""
        config = self.config
        limit = LIMIT if config.at_limit == "stop" else ()
        sources = [f"task.{source}." for source in ("hub", "files") if config.data.name != source]
        excluded = (*WITHOUT_EFFECT, *limit, *IN_OTHER_COLUMNS, *GRID, *unused(config), *sources)
        kept = leave_out(self.settings, excluded)
        if few_shot_folder(config) is not None:
            kept["data.dir"] = str(Path(str(data_dir(config.data))).parent)
        # A zero-shot run reads no training rows: only the kind of its test set counts.
        kept["data.shots"] = self.shots if not is_zero_shot(config) else self.shots is not None
        return kept

    def trouble(self) -> str:
        """Return why the run has no result: `failed (ERROR)`, `interrupted at step 3 of 10`."""
        if self.status == "failed":
            return f"failed ({' '.join(str(self.error).split())})"
        return f"{self.status} at step {self.steps_done} of {self.config.steps}"


def few_shot_folder(config: Config) -> re.Match[str] | None:
    """Return the match of (shots, data seed) in the name of a prepared few-shot folder; None for other data."""
    folder = data_dir(config.data)
    return None if folder is None or config.data.shots is not None else FEW_SHOT_FOLDER.fullmatch(Path(folder).name)


def read_runs(folders: Iterable[Path]) -> tuple[list[Entry], list[str]]:
    """Return the runs under `folders`, each once, and one warning per directory that cannot be read as a run."""
    runs = {run.path.resolve(): run for folder in folders for run in find_runs(folder)}
    entries, warnings = [], []
    for run in runs.values():
        try:
            entries.append(_read(run))
        except (UserError, OSError) as error:
            warnings.append(left_out(run, error))
    return entries, warnings


def left_out(run: Run, error: Exception) -> str:
    """Return the warning about a run that cannot be read."""
    return f"{relative_path(run.path)} is left out: {one_line(error)}"


def no_runs(folders: Iterable[Path], warnings: list[str]) -> UserError:
    """Return the error for folders without a run that can be read, with the first reason."""
    reason = f" that can be read: {warnings[0]}" if warnings else ""
    return UserError(f"no runs under {join(map(str, folders))}{reason}")


def read_run(path: Path) -> Entry:
    """Return the run in a directory."""
    return _read(Run.open(path))


def _read(run: Run) -> Entry:
    info, text = run.read()
    path = run.path
    config, status = read_config(path / "config.yaml", text), run.status(info)
    summary = run.read_summary() if status == "finished" else {}
    if status == "finished" and config.optimizer.replayable:
        trajectory.check_length(run.trajectory, summary.get("steps", config.steps))
    steps = [summary.get("steps", 0)]
    if status != "finished":
        steps = [trajectory.count_steps(run.trajectory), *(line["step"] for line in run.lines)]
    scores = _scores(path / "summary.json", summary, config.chosen_metric)
    start, error, fingerprint = (info.get(name) for name in ("start", "error", "data_fingerprint"))
    return Entry(run, config, status, error, str(start), fingerprint, max(steps), summary, scores)


def _scores(path: Path, summary: Mapping[str, Any], metric: str) -> dict[str, dict[str, float]]:
    """Return split -> metric by name, of the splits that summary.json has."""
    scores = {}
    for split in ("dev", "train", "test"):
        values = summary.get(split)
        if values is not None:
            scores[split] = metrics_of(values)
            if not {metric, "loss"} <= set(scores[split]):
                raise UserError(f"{path} is damaged: {split} lacks {metric} or loss")
    if summary and "dev" not in scores:
        raise UserError(f"{path} is damaged: it lacks dev")
    return scores
