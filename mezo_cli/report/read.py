"""Read the runs under some folders: the settings of each, how it ended, its scores and its statistics."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Config, data_dir
from mezo_cli.config.stored import read_config
from mezo_cli.console import relative_path
from mezo_cli.errors import UserError, one_line
from mezo_cli.optim import optimizer_class
from mezo_cli.runs import Run, completeness, find_runs, trajectory
from mezo_cli.runs.picked import picked_start

FEW_SHOT_FOLDER = re.compile(r"(\d+)-(\d+)")  # LM-BFF's name of a few-shot folder: shots and data seed
ONE_LABEL = 0.95  # share of rows from which on a run counts as predicting one label only


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation: the task's metric and the accuracy (both fractions), and the loss."""

    score: float
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Entry:
    """One run. `dev`, `train` and `test` are the scores of its best checkpoint; None where it has none (yet)."""

    run: Run
    config: Config
    status: str
    error: str | None
    start: str
    data_fingerprint: str | None
    steps_done: int
    summary: Mapping[str, Any]  # summary.json; empty until the run has finished
    dev: Scores | None
    train: Scores | None
    test: Scores | None

    @property
    def location(self) -> str:
        """The run directory, relative to the working directory if it lies below it."""
        return relative_path(self.run.path)

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return self.status == "finished"

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
    """Return the runs under `folders`, each once, and one warning per directory that cannot be read as a run.

    Raises:
        UserError: for a folder that does not exist.
    """
    found = {run.path.resolve(): run for folder in folders for run in find_runs(folder)}
    entries, warnings = [], []
    for run in found.values():
        try:
            entries.append(read_run(run.path))
        except (UserError, OSError) as error:
            warnings.append(f"{relative_path(run.path)} is left out: {one_line(error)}")
    return entries, warnings


def read_run(path: Path) -> Entry:
    """Return the run in a directory.

    Raises:
        UserError: when there is none, or its files are damaged.
    """
    run = Run.open(path)
    config, info, status = read_config(path / "config.yaml"), run.info(), run.status()
    summary = run.read_summary() if status == "finished" else {}
    if status == "finished" and optimizer_class(config.optimizer).replayable:
        trajectory.check_length(run.trajectory, summary.get("steps", config.steps))
    steps = [summary.get("steps", 0)]
    if status != "finished":
        steps = [completeness.recorded_steps(run), *(line["step"] for line in run.metrics())]
    scores = {split: _scores(path, summary, split, config.task.metric) for split in ("dev", "train", "test")}
    if summary and scores["dev"] is None:
        raise UserError(f"{path / 'summary.json'} is damaged: it lacks dev")
    start, error, fingerprint = (info.get(name) for name in ("start", "error", "data_fingerprint"))
    return Entry(run, config, status, error, str(start), fingerprint, max(steps), summary, **scores)


def _scores(path: Path, summary: Mapping[str, Any], split: str, metric: str) -> Scores | None:
    given = summary.get(split)
    if given is None:
        return None
    try:
        values: Sequence[float] = [float(given[name]) for name in (metric, "accuracy", "loss")]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / 'summary.json'} is damaged: {split} lacks {metric}, accuracy or loss") from error
    return Scores(*values)


# --- statistics of one run ---


@dataclass(frozen=True)
class Statistics:
    """How one run went. None where it has no such thing: no steps, no trajectory, no summary yet."""

    entry: Entry
    projected_grad: Mapping[str, float | None]  # zero_fraction, mean_abs, min_abs, max_abs over all steps
    train_losses: tuple[float, float] | None  # of the first and of the last logged step
    dev_losses: tuple[float, float]  # before the first step, and of the last evaluation
    predicted: Mapping[str, int]  # label -> number of rows with that prediction
    predicted_split: str  # the split of `predicted`: test, or else dev
    forwards: int | None
    backwards: int | None
    seconds: float

    @property
    def most_predicted(self) -> tuple[str, float]:
        """The label predicted most often, and its share of the rows."""
        label = max(self.predicted, key=lambda name: self.predicted[name])
        return label, self.predicted[label] / sum(self.predicted.values())

    @property
    def predicts_one_label(self) -> bool:
        """Whether (nearly) every row gets the same label."""
        return self.most_predicted[1] >= ONE_LABEL


def statistics_of(entry: Entry, warn: Callable[[str], None]) -> Statistics | None:
    """Return the statistics of a run; None if it has not been evaluated yet.

    `warn` is called if the trajectory of a run that has not finished ends with damaged records, which are left out.

    Raises:
        UserError: when its metrics or its trajectory are damaged.
    """
    lines = entry.run.metrics()
    evaluations = [line for line in lines if line["kind"] == "eval"]
    dev = [line for line in evaluations if line["split"] == "dev"]
    if not dev:
        return None
    last = ([line for line in evaluations if line["split"] == "test"] or dev)[-1]
    steps = [line for line in lines if line["kind"] == "train"]
    return Statistics(
        entry=entry,
        projected_grad=_projected_grad(entry, warn),
        train_losses=(steps[0]["loss"], steps[-1]["loss"]) if steps else None,
        dev_losses=(dev[0]["loss"], dev[-1]["loss"]),
        predicted=last["predicted"],
        predicted_split=last["split"],
        forwards=entry.summary.get("forwards"),
        backwards=entry.summary.get("backwards"),
        seconds=float(entry.summary.get("seconds", lines[-1]["seconds"])),
    )


def _projected_grad(entry: Entry, warn: Callable[[str], None]) -> Mapping[str, float | None]:
    """Return the statistics of the projected gradients of all steps, not only of the logged ones."""
    file, config = entry.run.trajectory, entry.config
    optimizer = optimizer_class(config.optimizer)(config.optimizer, config.seed, config.steps)
    if not optimizer.replayable or not file.exists() or not file.stat().st_size:
        return trajectory.projected_grad_stats(None)
    past = completeness.read_trajectory(entry.run, warn)
    return trajectory.projected_grad_stats(past.drawn_grads(optimizer.samples))
