"""Collect everything that a page or a terminal shows about one run. Needs its directory only: no model and no torch."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mezo_cli.errors import UserError
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.optim import optimizer_class
from mezo_cli.optim.settings import ZerothOrderConfig
from mezo_cli.report import untrained
from mezo_cli.report.read import ONE_LABEL, Entry
from mezo_cli.report.rerun import Changed, changed_settings, commands
from mezo_cli.report.series import Curve, Histogram, histogram, smoothed, thin_indices
from mezo_cli.report.settings import is_zero_shot, method_name
from mezo_cli.runs import completeness, trajectory
from mezo_cli.runs.picked import MARK

EXAMPLES = 10  # right and wrong test rows each
NO_PREDICTIONS = "This run has no predictions.jsonl: runs of earlier versions and trajectory folders have none."
OPEN_END = "Test rows appear once the run has finished."


@dataclass(frozen=True)
class Result:
    """One line of the result.

    Attributes:
        name: where and when it was measured.
        score: the task's metric.
        accuracy: a fraction.
        loss: None for a baseline, whose scores are moved by a bias.
        step: of the weights.
        interval: the 95% interval of the metric in percent; empty if it is not known.
    """

    name: str
    score: float
    accuracy: float
    loss: float | None
    step: int
    interval: str = ""


@dataclass(frozen=True)
class Evaluations:
    """The evaluations on dev, in order of steps."""

    steps: list[int]
    scores: list[float]
    losses: list[float]
    shares: list[dict[str, float]]  # label -> share of the rows predicted as it
    best: int  # the index of the best

    def best_text(self) -> str:
        """Return the best score and its step."""
        return f"{100 * self.scores[self.best]:.1f}% at step {self.steps[self.best]}"


@dataclass(frozen=True)
class Prediction:
    """The prediction for one test row."""

    row: int
    texts: Mapping[str, str]  # column -> text
    label: str
    predicted: str
    probabilities: Mapping[str, float]

    @property
    def confidence(self) -> float:
        """The probability of the predicted label."""
        return self.probabilities[self.predicted]


@dataclass(frozen=True)
class Examples:
    """Test rows to look at, right and wrong, from the surest prediction to the least sure; or why there are none."""

    right: list[Prediction]
    wrong: list[Prediction]
    right_count: int = 0
    wrong_count: int = 0
    majority: float = 0.0  # share of the most frequent label among all test rows
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (label, predicted) -> test rows
    message: str = ""


class RunDetails:
    """The facts of one run. Its parts are read and computed when they are asked for.

    Args:
        entry: the run. It may be running.

    Attributes:
        damage: what the files of a run that has not finished lack at their ends.

    Raises:
        UserError: (by its parts) when a file of the run is damaged.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry, self.run, self.config = entry, entry.run, entry.config
        self.info = self.run.info()
        self.damage: list[str] = []
        lines = self.run.metrics()
        train = [line for line in lines if line["kind"] == "train"]  # many: only these three are kept
        self._steps = np.array([line["step"] for line in train], int)
        self._losses, self._seconds = (np.array([line[key] for line in train], float) for key in ("loss", "seconds"))
        self._evaluations = [line for line in lines if line["kind"] == "eval"]

    @property
    def name(self) -> str:
        """The run directory, relative to the working directory."""
        return self.entry.location

    @property
    def metric(self) -> str:
        """The task's metric, by which the best checkpoint is chosen."""
        return self.config.task.metric

    # --- what it was ---

    @property
    def title(self) -> str:
        """Method, task and model in short."""
        return f"{method_name(self.config)} on {self.config.task.name} with {self.model}"

    @property
    def model(self) -> str:
        """The last part of the model's path."""
        return self.config.model.path.rstrip("/").rsplit("/", 1)[-1]

    def sentence(self) -> str:
        """Return one sentence that says what the run was."""
        config, objective = self.config, self.config.objective
        scored = f"{self._scoring()[0] or objective.name}, {objective.loss.replace('_', '-')} loss"
        shots = self.entry.shots
        data = f"{config.task.name} ({self._rows()}{f', {shots} per label' if shots else ''}; {scored})"
        if config.steps == 0:
            what = "was evaluated" if is_zero_shot(config) else "got a linear probe on its features and was evaluated"
            return f"{self.model} {what} on {data}; nothing else was trained."
        settings = f"learning rate {config.optimizer.lr:g}"
        if isinstance(config.optimizer, ZerothOrderConfig):
            settings += f", eps {config.optimizer.eps:g}"
        verb = "trains" if self.entry.status == "running" else "trained"
        steps = f"{config.steps:,}" if self.entry.finished else f"{self.entry.steps_done:,} of {config.steps:,}"
        return (
            f"{method_name(config)} {verb} {self._trained()} of {self.model} on {data} for {steps} steps of "
            f"{self._batch_size()} rows: {settings}, seed {config.seed}."
        )

    def _batch_size(self) -> int:
        """Return the rows of a step: a training set that is smaller than a batch is the whole batch."""
        size = self.config.batch_size
        return min(size, (self.info.get("rows") or {}).get("train") or size)

    def _rows(self) -> str:
        rows = self.info.get("rows") or {}
        return f"{rows['train']:,} training rows" if rows.get("train") is not None else f"{self.config.data.name} data"

    def _trained(self) -> str:
        trainable = self.info.get("trainable")
        if not trainable:
            return "the parameters"
        share = float(trainable["share"])
        count = f"{int(trainable['count']):,} parameters"
        return f"all {count}" if share == 1 else f"{count} ({100 * share:.2g}%)"

    @property
    def prompt(self) -> str | None:
        """The first training row as the model saw it; None for a run that did not record it."""
        prompt = self.info.get("prompt")
        return None if prompt is None else str(prompt)

    def label_words(self) -> list[tuple[str, str]]:
        """Return (label, its word) for each label; empty where the objective reads no label words."""
        return list(zip(self.config.task.labels, self._scoring()[1], strict=False))

    def _scoring(self) -> tuple[str, Sequence[str]]:
        """Return what scores a label, in words, and the label words: as recorded, or as the objective says it now."""
        if "scored_by" in self.info:
            return self.info["scored_by"], self.info["label_words"]
        encoder = OBJECTIVES.load(self.config.objective.name).encoder_class  # runs of earlier versions
        return encoder.scored_by, encoder.task_label_words(self.config.task)

    # --- the result ---

    @cached_property
    def dev(self) -> Evaluations | None:
        """The evaluations on dev; None before the first one."""
        lines = [line for line in self._evaluations if line["split"] == "dev"]
        if not lines:
            return None
        scores = [float(line[self.metric]) for line in lines]
        shares = [_shares(line["predicted"]) for line in lines]
        losses = [float(line["loss"]) for line in lines]
        return Evaluations([line["step"] for line in lines], scores, losses, shares, scores.index(max(scores)))

    def results(self) -> list[Result]:
        """Return dev before training and its best, test before training, baselines, test at best, as far as known."""
        if self.dev is None:
            return []
        lines = [line for line in self._evaluations if line["split"] == "dev"]
        last = {line["split"]: line for line in self._evaluations}
        start = "dev after the linear probe" if self.config.init == "linear_probe" else "dev before training"
        found = [self._result(start, lines[0])]
        mark = f" {MARK}" if self.entry.picked_start else ""
        if len(lines) > 1:
            best = f"dev best{mark}" if self.entry.finished else "dev best so far"
            found.append(self._result(best, lines[self.dev.best], "dev"))
        if "test_before" in last:
            found.append(self._result("test before training", last["test_before"], "test_before"))
        for one in untrained.baselines(self.entry.summary):
            score, accuracy = float(one.scores[self.metric]), float(one.scores["accuracy"])
            found.append(Result(one.name, score, accuracy, None, 0, untrained.interval(one.scores, self.metric)))
        return found + ([self._result(f"test at best{mark}", last["test"], "test")] if "test" in last else [])

    def _result(self, name: str, line: Mapping[str, Any], key: str = "") -> Result:
        """Return an evaluation as a line of the result, with the interval that summary.json has under a key."""
        values = (float(line[self.metric]), float(line["accuracy"]), float(line["loss"]), int(line["step"]))
        return Result(name, *values, untrained.interval(self.entry.summary.get(key) or {}, self.metric))

    def baseline_sentence(self) -> str:
        """Return what training has gained beside a removed bias; empty where that is not known."""
        return untrained.sentence(self.entry.summary, self.metric)

    def gain(self) -> float | None:
        """Return by how many points the best dev score is above that before training; None without steps."""
        if self.dev is None or len(self.dev.scores) < 2:
            return None
        return 100 * (self.dev.scores[self.dev.best] - self.dev.scores[0])

    @property
    def one_label(self) -> tuple[str, float] | None:
        """The label predicted for nearly all rows of the last evaluation, and its share; None if there is none."""
        if self.dev is None:
            return None
        label, share = max(self.dev.shares[-1].items(), key=lambda item: item[1])
        return (label, share) if share >= ONE_LABEL else None

    # --- curves ---

    @cached_property
    def loss(self) -> Curve | None:
        """The training loss of the logged steps; None before the first."""
        return smoothed(self._steps, self._losses) if len(self._steps) else None

    @cached_property
    def _projected_grads(self) -> np.ndarray | None:
        file, optimizer = self.run.trajectory, self._optimizer
        if not optimizer.replayable or not file.exists() or not file.stat().st_size:
            return None
        return completeness.read_trajectory(self.run, self.damage.append).drawn_grads(optimizer.samples)

    @cached_property
    def gradients(self) -> Histogram | None:
        """The sizes of the projected gradients of all steps; None for a method that has none, and before the first."""
        values = self._projected_grads
        return None if values is None or not values.size else histogram(values)

    @cached_property
    def gradient_stats(self) -> Mapping[str, float | None]:
        """The share of zeros and mean, least and greatest |g|."""
        return trajectory.projected_grad_stats(self._projected_grads)

    @cached_property
    def _optimizer(self) -> Any:
        return optimizer_class(self.config.optimizer)(self.config.optimizer, self.config.seed, self.config.steps)

    def forwards(self, step: int) -> int:
        """Return the forwards of a batch until a step, those of a linear probe before the first included."""
        probe = (self.info.get("probe") or {}).get("forwards", 0)
        return int(self._optimizer.passes(step)["forwards"]) + int(probe)

    @cached_property
    def speed(self) -> Curve | None:
        """The steps per second between logged steps; None for fewer than three of them."""
        if len(self._steps) < 3:
            return None
        passed, done = np.diff(self._seconds), np.diff(self._steps)
        known = passed > 0  # a time is stored to the millisecond
        if not known.any():
            return None
        return smoothed(self._steps[1:][known], done[known] / passed[known])

    # --- test rows ---

    @cached_property
    def examples(self) -> Examples:
        """Test rows to look at.

        They are spread evenly over all right and all wrong rows, ordered by the probability of the predicted label.
        """
        rows = self.run.predictions()
        if not rows:
            has_test = self.entry.test is not None
            message = NO_PREDICTIONS if has_test else "There is no test split." if self.entry.finished else OPEN_END
            return Examples([], [], message=message)
        found = [
            Prediction(row["row"], row["columns"], row["label"], row["predicted"], row["probabilities"]) for row in rows
        ]
        found.sort(key=lambda one: (-one.confidence, one.row))
        right = [one for one in found if one.predicted == one.label]
        wrong = [one for one in found if one.predicted != one.label]
        majority = max(Counter(one.label for one in found).values()) / len(found)
        counts = Counter((one.label, one.predicted) for one in found)
        return Examples(_spread(right), _spread(wrong), len(right), len(wrong), majority, counts)

    # --- setup ---

    def settings(self) -> list[Changed]:
        """Return the settings that differ from the defaults."""
        return changed_settings(self.config)

    def commands(self) -> list[tuple[str, str]]:
        """Return what can be done with the run, and the command for it."""
        best = None if self.dev is None else self.dev.steps[self.dev.best]
        resumable = not (self.run.path / "export.json").exists()  # that of a folder made by `mezo export --trajectory`
        return commands(self.config, self.name, self.entry.status, best, resumable)

    def facts(self) -> list[tuple[str, str]]:
        """Return what is known about where and how the run was made: (name, value)."""
        info, summary = self.info, self.entry.summary
        dirty = " with uncommitted changes" if info.get("git_dirty") else ""
        values = {
            "started": info.get("start"),
            "ended": info.get("end"),
            "device": info.get("device"),
            "host": info.get("host"),
            "training": f"{float(summary['seconds']):,.0f} s" if "seconds" in summary else None,
            "forwards": f"{summary['forwards']:,}" if "forwards" in summary else None,
            "backwards": f"{summary['backwards']:,}" if summary.get("backwards") else None,
            "peak memory": f"{summary['peak_memory_bytes'] / 1e9:.2f} GB" if summary.get("peak_memory_bytes") else None,
            "noise": info.get("noise_kernels"),
            "data": (info.get("data_fingerprint") or "")[:12] or None,
            "data revision": info.get("data_revision"),
            "model revision": info.get("model_revision"),
            "git commit": f"{info['git_commit']}{dirty}" if info.get("git_commit") else None,
            **_origin([str(word) for word in info.get("argv") or ()]),
        }
        return [(name, str(value)) for name, value in values.items() if value is not None]

    def versions(self) -> list[tuple[str, str]]:
        """Return the versions of Python and of the libraries: (name, version)."""
        return [(name, str(version)) for name, version in (self.info.get("versions") or {}).items()]


def read_details(entry: Entry) -> RunDetails:
    """Return the details of a run with all its files read.

    Raises:
        UserError: when one of them is damaged.
    """
    try:
        found = RunDetails(entry)
        found.sentence()
        found.facts()
        found.results()
        found.baseline_sentence()
        for part in ("examples", "dev", "loss", "speed", "gradients", "gradient_stats"):
            getattr(found, part)
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{entry.run.path} is damaged: a file lacks what belongs there ({error!r})") from error


def _origin(argv: Sequence[str]) -> dict[str, str]:
    """Return the command line that made a run, or the call from Python."""
    if argv[1:2] == ["finetune"]:
        return {"Python call": f"finetune({', '.join(argv[2:])})"}
    return {"command line": shlex.join(["mezo", *argv[1:]])} if argv else {}


def _shares(predicted: Mapping[str, int]) -> dict[str, float]:
    total = sum(predicted.values()) or 1
    return {label: count / total for label, count in predicted.items()}


def _spread(rows: Sequence[Prediction]) -> list[Prediction]:
    return [rows[i] for i in thin_indices(len(rows), EXAMPLES)]
