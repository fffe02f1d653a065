"""Collect everything that a page or a terminal shows about one run. Needs its directory only: no model and no torch."""

import json
import re
import shlex
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.schema import data_dir
from mezo_cli.data.texts import read_columns
from mezo_cli.errors import UserError
from mezo_cli.optim import optimizer_class
from mezo_cli.report import untrained
from mezo_cli.report.read import Entry
from mezo_cli.report.settings import method_name
from mezo_cli.runs import trajectory
from mezo_cli.runs.run import own_reward
from mezo_cli.runs.scores import MARK, NOTE, metrics_of

EXAMPLES = 10  # right and wrong test rows each
ONE_LABEL = 0.95  # fraction of rows from which on a run counts as predicting one label only
MOSTLY_ZERO = 0.5  # fraction of projected gradients that are exactly 0 from which on a note says so
ALWAYS = ("step", "loss", "seconds")  # of a training step, in its line of metrics.jsonl
REWARDS = ("reward", "reward_min", "reward_max")  # over the members of a step, in its line of metrics.jsonl
OPEN_END = "Test rows appear once the run has finished."


@dataclass(frozen=True)
class Result:
    """One line of the result.

    Attributes:
        name: where and when it was measured.
        scores: metric -> value, with the `loss`; a baseline, whose scores are moved by a bias, has no loss.
        step: of the weights.
        interval: the 95% interval of the run's metric; empty if it is not known.
    """

    name: str
    scores: Mapping[str, float]
    step: int
    interval: str = ""


@dataclass(frozen=True)
class Examples:
    """Test rows to look at, right and wrong, from the surest prediction to the least sure; or why there are none.

    The rows are those of predictions.jsonl; `counts` says how often each (label, predicted) occurs among all of them.
    Of a run that generates text they are `completions`, from the best to the worst.
    """

    right: Sequence[Mapping[str, Any]] = ()
    wrong: Sequence[Mapping[str, Any]] = ()
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    message: str = ""
    completions: Sequence[Mapping[str, Any]] = ()

    def count(self, right: bool) -> int:
        """Return the number of all test rows that are predicted right, or wrong."""
        return sum(n for (label, predicted), n in self.counts.items() if (label == predicted) == right)

    @property
    def majority(self) -> float:
        """The fraction of the most frequent label among all test rows; 0 without rows."""
        labels: Counter[str] = Counter()
        for (label, _), n in self.counts.items():
            labels[label] += n
        return max(labels.values(), default=0) / max(labels.total(), 1)


class RunDetails:
    """The facts of one run. Its parts are read and computed when they are asked for.

    Args:
        entry: the run. It may be running.

    Attributes:
        damage: what the files of a run that has not finished lack at their ends.
        steps, losses, seconds: arrays, of the logged training steps.
        rewards: arrays by name, of the same steps, of a run on rewards: `reward`, `reward_min`, `reward_max`; else {}.
        evaluations: the lines of metrics.jsonl, in order.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry, self.run, self.config, self.metric = entry, entry.run, entry.config, entry.metric
        self.info = self.run.info()
        self.damage: list[str] = []
        self.evaluations: list[dict[str, Any]] = []
        kept: dict[str, array[float]] = {}  # of training lines, which are many
        for line in self.run.lines:
            if line["kind"] == "eval":
                self.evaluations.append(line)
            elif line["kind"] == "train":
                kept = kept or {name: array("d") for name in (*ALWAYS, *REWARDS) if name in line}
                for name, values in kept.items():
                    values.append(line[name])
        self.steps, self.losses, self.seconds = (np.array(kept.get(name, ())) for name in ALWAYS)
        self.steps = self.steps.astype(int)
        self.rewards = {name: np.array(kept[name]) for name in REWARDS if name in kept}

    @property
    def name(self) -> str:
        """The run directory, relative to the working directory."""
        return self.entry.location

    @property
    def total_seconds(self) -> float:
        """How long the training has taken, or has taken so far."""
        logged = [*self.seconds[-1:], *(line["seconds"] for line in self.evaluations[-1:])]
        return float(self.entry.summary.get("seconds", max(logged, default=0.0)))

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
        reward = (self.info.get("reward") or {}).get("name")
        measure = f"reward {reward}" if reward and objective.loss == "reward" else f"{objective.loss} loss"
        scored = (
            f"{self.info.get('scored_by') or objective.name}, {measure.replace('_', '-') if not reward else measure}"
        )
        shots = self.entry.shots
        data = f"{config.task.name} ({self._rows()}{f', {shots} per label' if shots else ''}; {scored})"
        if config.steps == 0:
            what = "was evaluated" if config.init == "none" else "got a linear probe on its features and was evaluated"
            return f"{self.model} {what} on {data}; nothing else was trained."
        settings = f"learning rate {config.optimizer.lr:g}"
        if isinstance(config.optimizer, PerturbationConfig):
            settings += f", eps {config.optimizer.eps:g}"
        verb = "trains" if self.entry.status == "running" else "trained"
        steps = f"{config.steps:,}" if self.entry.finished else f"{self.entry.steps_done:,} of {config.steps:,}"
        size = min(config.batch_size, (self.info.get("rows") or {}).get("train") or config.batch_size)
        return (
            f"{method_name(config)} {verb} {self._trained()} of {self.model} on {data} for {steps} steps of "
            f"{size} rows: {settings}, seed {config.seed}."
        )

    def _rows(self) -> str:
        rows = self.info.get("rows") or {}
        return f"{rows['train']:,} training rows" if rows.get("train") is not None else f"{self.config.data.name} data"

    def _trained(self) -> str:
        trainable = self.info.get("trainable")
        if not trainable:
            return "the parameters"
        fraction = float(trainable["share"])
        count = f"{int(trainable['count']):,} parameters"
        return f"all {count}" if fraction == 1 else f"{count} ({100 * fraction:.2g}%)"

    @property
    def prompt(self) -> str | None:
        """The first training row as the model saw it; None for a run that did not record it."""
        prompt = self.info.get("prompt")
        return None if prompt is None else str(prompt)

    def label_words(self) -> list[tuple[str, str]]:
        """Return (label, its word) for each label; empty where the objective reads no label words."""
        return list(zip(self.config.task.labels, self.info.get("label_words", ()), strict=False))

    # --- the result ---

    @property
    def dev(self) -> list[dict[str, Any]]:
        """The evaluations on dev, in order of steps; empty before the first one."""
        return [line for line in self.evaluations if line["split"] == "dev"]

    def dev_scores(self) -> dict[int, float]:
        """Return step -> the metric on dev."""
        return {line["step"]: line[self.metric] for line in self.dev}

    @cached_property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation on dev, as the run picks it; None before the first."""
        return min(self.dev, key=self.config.rank, default=None)

    @property
    def last(self) -> dict[str, Any] | None:
        """The evaluation on test at the best checkpoint, or else the last one on dev; None before the first one."""
        tests = [line for line in self.evaluations if line["split"] == "test"]
        return next(reversed([*self.dev, *tests]), None)

    def results(self) -> list[Result]:
        """Return dev before training and its best, test before training, baselines, test at best, as far as known."""
        if self.best is None:
            return []
        last = {line["split"]: line for line in self.evaluations}
        start = "dev after the linear probe" if self.config.init == "linear_probe" else "dev before training"
        results = [Result(start, metrics_of(self.dev[0]), self.dev[0]["step"])]
        mark = f" {MARK}" if self.entry.picked_start else ""
        if len(self.dev) > 1:
            results.append(self._result(f"dev best{mark}" if self.entry.finished else "dev best so far", self.best))
        if "test_before" in last:
            results.append(self._result("test before training", last["test_before"]))
        for name, scores in untrained.baselines(self.entry.summary).items():
            results.append(Result(name, metrics_of(scores), 0, untrained.interval(scores, self.metric)))
        return results + ([self._result(f"test at best{mark}", last["test"])] if "test" in last else [])

    def _result(self, name: str, line: Mapping[str, Any]) -> Result:
        """Return an evaluation as a line of the result, with the interval that summary.json has for its split."""
        interval = untrained.interval(self.entry.summary.get(line["split"]) or {}, self.metric)
        return Result(name, metrics_of(line), line["step"], interval)

    def conclusions(self) -> list[str]:
        """Return the verdict with the figures behind it, and what was gained beside a removed bias, where known."""
        verdict, reason = self.entry.verdict, self.entry.summary.get("verdict_reason")
        said = [f"Verdict: {verdict}, {reason}."] if verdict and reason else []
        return [*said, *filter(None, [untrained.sentence(self.entry.summary, self.config)])]

    def warnings(self) -> list[str]:
        """Return what a reader must know before believing the numbers of a run."""
        texts = {
            "finished": [],
            "running": [f"The run is still running: step {self.entry.steps_done:,} of {self.config.steps:,}."],
            "interrupted": [f"The run was {self.entry.trouble()}. It can be resumed."],
        }.get(self.entry.status, [f"The run {self.entry.trouble()}."])
        texts += [f"{text[0].upper()}{text[1:]}." for text in self.damage]
        if self.entry.verdict == "diverged":
            texts.append("The run diverged: its loss rose far above the first, or every dev row got one label.")
        if self.entry.picked_start:
            texts.append(f"{NOTE}.")
        for label, fraction in predicted_fractions(self.last or {}).items():
            if self.last and fraction >= ONE_LABEL:
                texts.append(f"{label} is predicted for {100 * fraction:.0f}% of the {self.last['split']} rows.")
        zero = self.gradient_stats["zero_fraction"]
        if zero is not None and zero >= MOSTLY_ZERO:
            symbol = self.optimizer.symbol
            texts.append(f"{symbol} is exactly 0 in {100 * zero:.0f}% of all samples, which then change nothing.")
        return texts

    # --- the steps ---

    @cached_property
    def projected_grads(self) -> np.ndarray | None:
        """Those of all steps, or what is recorded in their place; None where nothing is, and before the first step."""
        file, optimizer = self.run.trajectory, self.optimizer
        if not optimizer.replayable or not file.exists() or not file.stat().st_size:
            return None
        grads = self.run.read_trajectory().drawn_grads(optimizer.shown)
        return grads if grads.size else None

    @cached_property
    def gradient_stats(self) -> Mapping[str, float | None]:
        """The fraction of zeros and mean, least and greatest size."""
        return trajectory.scalar_stats(self.projected_grads)

    @cached_property
    def optimizer(self) -> Any:
        """The optimizer of the run, before its first step."""
        return optimizer_class(self.config.optimizer)(self.config.optimizer, self.config.seed, self.config.steps)

    def forwards(self, step: int) -> int:
        """Return the forwards of a batch until a step, those of a linear probe before the first included."""
        probe = (self.info.get("probe") or {}).get("forwards", 0)
        return int(self.optimizer.count_forwards(step)["forwards"]) + int(probe)

    @property
    def median_speed(self) -> float | None:
        """The median of the steps per second between logged steps; None before the second of them."""
        passed, done = np.diff(self.seconds), np.diff(self.steps)
        known = passed > 0  # a time is stored to the millisecond
        return float(np.median(done[known] / passed[known])) if known.any() else None

    # --- test rows ---

    @cached_property
    def examples(self) -> Examples:
        """Test rows to look at.

        They are spread evenly over all right and all wrong rows, ordered by the probability of the predicted label.
        """
        rows = self.run.predictions(self.evaluations)
        if not rows:
            return Examples(message="It has no predictions of test rows." if self.entry.finished else OPEN_END)
        if "predicted" not in rows[0]:
            ordered = sorted(rows, key=lambda row: (-metrics_of(row).get(self.metric, 0.0), row["row"]))
            return Examples(completions=_spread(ordered))
        rows = sorted(rows, key=lambda row: (-confidence(row), row["row"]))
        right = [row for row in rows if row["predicted"] == row["label"]]
        wrong = [row for row in rows if row["predicted"] != row["label"]]
        counts = Counter((row["label"], row["predicted"]) for row in rows)
        return Examples(_spread(right), _spread(wrong), counts)

    # --- dev rows ---

    @cached_property
    def completions(self) -> dict[int, list[dict[str, Any]]]:
        """Step -> what the model said of some dev rows at the start, the best step and the last; {} for most runs."""
        kept, lacking = self.run.completions(self.evaluations), {"kind", "step", "crc", "row"}
        best = [] if self.best is None else [int(self.best["step"])]
        steps = sorted({*list(kept)[:1], *list(kept)[-1:], *(step for step in best if step in kept)})
        return {step: [{k: v for k, v in row.items() if k not in lacking} for row in kept[step]] for step in steps}

    def name_step(self, step: int) -> str:
        """Return what a step of `completions` is: `step 0, start`."""
        best = self.best is not None and step == self.best["step"]
        marks = {"start": step == min(self.completions), "best": best, "last": step == max(self.completions)}
        return ", ".join([f"step {step:,}", *(name for name, applies in marks.items() if applies)])

    # --- setup ---

    def commands(self) -> list[tuple[str, str]]:
        """Return what can be done with the run, and the command for it."""
        config, status, optimizer = self.config, self.entry.status, self.optimizer
        resumable = "weights" not in self.info  # as of a run that `mezo export --trajectory` wrote
        data = ["data.dir=DIR"] if config.data.name == "files" and data_dir(config.data) is None else []

        def command(verb: str, *words: str) -> str:
            return self.run.command(verb, *words, info=self.info)

        commands = [("Run again", self._train_command)]
        if resumable and status in ("interrupted", "failed"):
            commands.append(("Resume", command("resume")))
        elif (
            resumable
            and status == "finished"
            and config.steps
            and self.config.forwards is None
            and not config.optimizer.depends_on_total_steps
        ):
            commands.append(("Train longer", command("resume", f"steps={2 * config.steps}")))
        if optimizer.replayable and config.steps and self.best is not None:
            replay = command("replay", "--step", str(self.best["step"]), "--out", "FOLDER")
            commands.append(("Rebuild the weights of a step", replay))
        if status == "finished":
            commands.append(("Evaluate", command("eval", "--split", "test", *data)))
            commands.append(("Export the model", command("export", "--out", "FOLDER")))
            commands.append(("Predict a text of your own", command("predict") + self._texts()))
        return [(name, command) for name, command in commands if command]

    def _texts(self) -> str:
        """Return the words of `mezo predict` that give one row; a list or a record is that of a test row."""
        columns, rows = read_columns(self.config.data_task), self.examples.completions
        values = rows[0]["columns"] if rows else {}
        lists = {name: json.dumps(value) for name, value in values.items() if isinstance(value, (list, dict))}
        names = columns if len(columns) > 1 else []
        words = [f"{name}={lists.get(name, '...')}" for name in names] or [lists.get(columns[0], "...")]
        quoted = (f'"{word}"' if re.fullmatch(r"[\w=.]+", word) else shlex.quote(word) for word in words)
        return "".join(f" --text {word}" for word in quoted)

    @cached_property
    def _train_command(self) -> str:
        """The command that began the run, without its directory. Empty for a run that did not record it."""
        words = [str(word) for word in self.info.get("argv") or ()][1:]
        if words and not any("objective.reward=" in word for word in words):  # a job gets it from its environment
            words += own_reward(self.info)
        return _command([word for word in words if word != "-q" and not word.startswith("hydra.run.dir=")])

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
            "mezo commit": f"{info['git_commit']}{dirty}" if info.get("git_commit") else None,
            "command line": _command(list(map(str, info.get("argv") or ()))[1:]) or None,
        }
        return [(name, str(value)) for name, value in values.items() if value is not None]

    def versions(self) -> list[tuple[str, str]]:
        """Return the versions of Python and of the libraries: (name, version)."""
        return [(name, str(version)) for name, version in (self.info.get("versions") or {}).items()]


def read_details(entry: Entry) -> RunDetails:
    """Return the details of a run with all its files read."""
    try:
        details = RunDetails(entry)
        for part in (details.sentence, details.facts, details.results, details.conclusions, details.commands):
            part()
        details.warnings()
        _ = details.examples, details.completions
        return details
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{entry.run.path} is damaged: a file lacks what belongs there ({error!r})") from error


def predicted_fractions(line: Mapping[str, Any]) -> dict[str, float]:
    """Return label -> the fraction of the rows predicted as it, of an evaluation; empty where it counts no labels."""
    predicted = line.get("predicted") or {}
    total = sum(predicted.values()) or 1
    return {label: count / total for label, count in predicted.items()}


def confidence(row: Mapping[str, Any]) -> float:
    """Return the probability of the predicted label of a test row."""
    return float(row["probabilities"][row["predicted"]])


def thin_indices(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced indices of `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) if count else np.zeros(0, int)


def _spread(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [rows[i] for i in thin_indices(len(rows), EXAMPLES)]


def _command(words: Sequence[str]) -> str:
    """Return the words behind `mezo` as a command line, or as the call from Python; empty without words."""
    if words[:1] == ["finetune"]:
        return f"finetune({', '.join(words[1:])})"
    return shlex.join(["mezo", *words]) if words else ""
