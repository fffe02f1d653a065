"""Read the runs under some folders: the files of each as one `Entry`, from which every view is made."""

import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mezo_cli.config.schema import Config, data_dir, to_dict
from mezo_cli.console import relative_path
from mezo_cli.errors import UserError, join, one_line
from mezo_cli.report.settings import flatten, is_zero_shot, parts
from mezo_cli.runs import BEFORE_TRAINING, Run, find_runs, trajectory
from mezo_cli.runs.contents import metrics_of, picked_start

FEW_SHOT_FOLDER = re.compile(r"(\d+)-(\d+)")  # LM-BFF's name of a few-shot folder: shots and data seed
SPLITS = ("dev", "train", "test", "test_before")
LOGGED = ("step", "loss", "reward", "reward_min", "reward_max")  # of a training step's line
BASELINES = {  # name in summary.json (objectives/scoring.py) -> in tables
    "label_shares": "threshold: label shares",
    "best_threshold": "threshold: best on train",
    "fitted_bias": "bias fitted on train",
}


@dataclass(eq=False)
class Entry:
    """One run: its files as they are read."""

    run: Run
    config: Config
    info: Mapping[str, Any]
    status: str
    steps_done: int
    summary: Mapping[str, Any]  # summary.json; empty until the run has finished

    def __post_init__(self) -> None:
        config, summary, self.finished = self.config, self.summary, self.status == "finished"
        # Split -> metric or `loss` -> value, of the best checkpoint; `test_before`: of the untrained model.
        self.scores = {split: metrics_of(summary[split]) for split in SPLITS if summary.get(split) is not None}
        self.location, self.settings = relative_path(self.run.path), flatten(to_dict(config))
        self.metric, self.model = config.chosen_metric, Path(config.model.path).name
        self.verdict, self.picked_start = summary.get("verdict", self.info.get("verdict")), picked_start(summary)
        # Training rows per label, None for all, and the seed that drew them: one for all runs on them (`group_runs`).
        self.shots, self.data_seed = config.data.shots, config.data_seed
        folder = Path(data_dir(config.data) or ".")
        few_shot = None if self.shots is not None else FEW_SHOT_FOLDER.fullmatch(folder.name)
        if few_shot is not None:
            self.shots, self.data_seed = map(int, few_shot.groups())
        self.seeds = f"{config.seed}" + ("" if config.seed == self.data_seed else f" (data {self.data_seed})")
        self.data = self.info.get("data_fingerprint")
        self.point, self.common = parts(config, self.settings)
        if few_shot is not None:
            self.common["data.dir"] = str(folder.parent)
        # A zero-shot run reads no training rows: only the kind of its test set counts.
        self.common["data.shots"] = self.shots if not is_zero_shot(config) else self.shots is not None
        self.group = json.dumps(self.common, sort_keys=True, default=str)

    def score(self, split: str, metric: str | None = None) -> float | None:
        """Return a metric (`self.metric` if not given) of the best checkpoint on a split, on dev of the best so far."""
        scores = self.scores.get(split) or (self.best if split == "dev" and not self.finished else None) or {}
        return scores.get(metric or self.metric)

    @property
    def outcome(self) -> str:
        """The status, or `diverged`, which a finished and a failed run may have."""
        return "diverged" if self.verdict == "diverged" else self.status

    def trouble(self) -> str:
        """Return why the run has no result: `failed (ERROR)`, `interrupted at step 3 of 10`."""
        if self.status == "failed":
            return f"failed ({' '.join(str(self.info.get('error')).split())})"
        return f"{self.status} at step {self.steps_done} of {self.config.steps}"

    @cached_property
    def metrics(self) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
        """The logged steps as columns (none: {}), rewards where there are any; and the evaluations, in order."""
        columns: dict[str, array[float]] = {}  # of many lines: 8 bytes a number
        evaluations = []
        for line in self.run.lines:
            if line["kind"] == "eval":
                evaluations.append(line)
            elif line["kind"] == "train":
                columns = columns or {name: array("d") for name in LOGGED if name in line}
                for name, values in columns.items():
                    values.append(line[name])
        arrays = {name: np.array(values) for name, values in columns.items()}
        return arrays | {"step": arrays["step"].astype(int)} if arrays else {}, evaluations

    @property
    def dev(self) -> list[dict[str, Any]]:
        """The evaluations on dev, in order of steps; empty before the first one."""
        return [line for line in self.metrics[1] if line["split"] == "dev"]

    @cached_property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation on dev, as the run picks it or has picked it; None before the first."""
        picked = self.summary["best"]["step"] if self.summary else None
        found = min((line for line in self.dev if picked in (None, line["step"])), key=self.config.rank, default=None)
        if found is None and picked is not None:
            raise UserError(f"{self.run.lines.path} is damaged: it lacks the evaluation of step {picked}")
        return found

    def intervals(self, line: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
        """Return metric -> its 95% interval for one of the evaluations; {} where summary.json has none."""
        scores = self.summary.get(line["split"]) if line["split"] != "dev" or line is self.best else None
        return (line if "intervals" in line else scores or {}).get("intervals") or {}

    def forwards(self, step: int) -> int:
        """Return the forwards of a batch until a step, those before the first step included."""
        before = sum(self.info[what]["forwards"] for what in BEFORE_TRAINING if self.info.get(what))
        return self.config.optimizer.count_forwards(step, self.config.steps)["forwards"] + int(before)


def predicted_fractions(line: Mapping[str, Any]) -> dict[str, float]:
    """Return label -> the fraction of the rows predicted as it, of an evaluation; empty where it counts no labels."""
    predicted = line.get("predicted") or {}
    total = sum(predicted.values()) or 1
    return {label: count / total for label, count in predicted.items()}


def result_split(summary: Mapping[str, Any]) -> str:
    """Return the split of a run's result: test, or dev where there is no test split."""
    return "test" if summary.get("test") else "dev"


def baselines(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the scores of the untrained model with the bias between its labels removed, on the split of the result.

    By name; none for runs that have not computed them.
    """
    split, biases = result_split(summary), summary.get("baselines") or {}
    return {f"{split}, {BASELINES.get(name, name)}": one[split] for name, one in biases.items()}


def read_runs(folders: Iterable[Path]) -> tuple[list[Entry], list[str]]:
    """Return the runs under `folders`, each once, and one warning per directory that cannot be read as a run."""
    entries, warnings = [], []
    for run in {run.path.resolve(): run for folder in folders for run in find_runs(folder)}.values():
        try:
            entries.append(read_entry(run))
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


def read_entry(run: Run) -> Entry:
    """Return a run as its files are now; nothing is repaired."""
    info, config, status, summary = run.contents()
    done = summary["steps"] if summary else trajectory.length(run.trajectory)[0]
    entry = Entry(run, config, info, status, done, summary)
    for split in ["dev"] * bool(summary) + list(entry.scores):
        if not {entry.metric, "loss"} <= set(entry.scores.get(split, ())):
            raise UserError(f"{run.path / 'summary.json'} is damaged: {split} lacks {entry.metric} or loss")
    if not summary:
        logged, evaluations = entry.metrics
        entry.steps_done = int(max([done, *logged.get("step", ())[-1:], *(line["step"] for line in evaluations)]))
    return entry
