"""One run: train(config, run) and evaluate(session, rows). It reads from top to bottom."""

import logging
import math
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console

from mezo_cli import data, loggers, models, trajectory
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.objectives import LOSSES
from mezo_cli.runs import Run
from mezo_cli.schema import Config, Encoded, Splits
from mezo_cli.scores import score
from mezo_cli.session import Session, prepare, weights_at

log = logging.getLogger("mezo")


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation saw. `predicted` counts the rows given each label: a model that says one thing shows."""

    loss: float
    accuracy: float
    predicted: dict[str, int]
    score: float  # the task's own metric: accuracy unless the task says otherwise
    metric: str

    def line(self) -> dict[str, Any]:
        """Return it as the fields of a metrics.jsonl line."""
        named = {} if self.metric == "accuracy" else {self.metric: self.score}
        return {"loss": self.loss, "accuracy": self.accuracy, **named, "predicted": self.predicted}


def train(config: Config, run: Run, console: Console, resume: bool = False) -> dict[str, Any]:
    """Train, evaluate and write the run directory; return the summary.

    Raises:
        UserError: before training begins, for anything the user can mend.
        RunFailed: when the loss is not finite.
    """
    with run.recording():
        splits = load_data(config)
        session = prepare(config)
        train_rows, dev_rows = (session.inputs.encode_all(rows) for rows in (splits.train, splits.dev))
        test_rows = None if splits.test is None else session.inputs.encode_all(splits.test)
        dead = session.params.keep_live(lambda: session.objective.logits(session.batch(train_rows[:1])))
        run.update(device=device_name(session.loaded.device), data_fingerprint=splits.fingerprint)
        _announce(session, splits, dead)
        course = Course(session, run, dev_rows)
        course.start(resume)
        with loggers.meter(console, config.steps, course.done) as meter, torch.no_grad():
            course.go(train_rows, meter)
        summary = course.finish(test_rows)
    return summary


class Course:
    """The training of one run: its steps, its evaluations, the best so far."""

    def __init__(self, session: Session, run: Run, dev_rows: list[Encoded]) -> None:
        self.session, self.run, self.dev_rows = session, run, dev_rows
        self.config = session.config
        self.done = 0
        self.best: tuple[int, float] | None = None  # step, score
        self._before = 0.0  # seconds of earlier sessions of this run
        self._evaluated: set[int] = set()
        self._logger = loggers.make(self.config.logger, run.path)

    def start(self, resume: bool) -> None:
        """Open the trajectory of a new run, or go back to where an interrupted one stood."""
        path = self.run.path / "trajectory.bin"
        model, keep = self.session.loaded.model, 0
        if resume and path.exists():
            past = trajectory.read(path)
            models.restore(model, self.run.start_file)
            models.check_fingerprint(model, past.header.fingerprint, path)
            self.session.optimizer.apply(self.session.params, past.records(0, len(past)))
            self.done, keep = len(past), past.sound
            self._recall()
        elif self.session.loaded.fresh:
            models.keep(model, self.session.loaded.fresh, self.run.start_file)
        header = trajectory.Header(
            fingerprint=models.fingerprint(model) if not keep else past.header.fingerprint,
            optimizer=self.config.optimizer.name,
            noise=self.config.optimizer.noise,
            seed=self.config.seed,
            samples=self.config.optimizer.samples,
            weight_decay=self.config.optimizer.weight_decay,
            tensors=[(name, list(p.shape)) for name, p in self.session.params.tensors.items()],
        )
        self._file = self.run.open_trajectory(keep)
        self._writer = trajectory.Writer(self._file, header)
        self._began = time.perf_counter()

    def _recall(self) -> None:
        """Take up the metrics that an interrupted run left; what it wrote past its last step is cut."""
        self.run.cut_metrics(self.done)
        self._before = max((float(line["seconds"]) for line in self.run.metrics()), default=0.0)
        for line in self.run.evaluations("dev"):
            self._evaluated.add(line["step"])
            self._rank(line["step"], line[self.config.task.metric])

    def go(self, train_rows: list[Encoded], meter: loggers.Meter) -> None:
        """Step until the end, evaluating every `eval_every` steps, before the first and after the last."""
        config, session = self.config, self.session
        order = Order(len(train_rows), config.batch_size, config.seed)
        self._evaluate(meter)
        first = self.done
        for step in range(self.done, config.steps):
            batch = session.batch([train_rows[i] for i in order.batch(step)])
            result = session.optimizer.step(session.params, partial(session.loss, batch), step)
            if not math.isfinite(result.loss_plus) or not math.isfinite(result.loss_minus):
                raise RunFailed(
                    f"step {step + 1}: the loss is not finite (loss_plus {result.loss_plus}, loss_minus "
                    f"{result.loss_minus}); try a lower optimizer.lr (now {config.optimizer.lr:g})"
                )
            self._writer.append(step, result.projected_grads, result.lr)
            self.done = step + 1
            rate = (self.done - first) / (time.perf_counter() - self._began)
            meter.step(self.done, result.loss, rate)
            if self.done % config.log_every == 0 or self.done == config.steps:
                self._log(result)
            self._evaluate(meter)

    def _log(self, result: Any) -> None:
        values = {
            "loss": result.loss,
            "loss_plus": result.loss_plus,
            "loss_minus": result.loss_minus,
            "projected_grad": result.projected_grad,
            "lr": result.lr,
            "seconds": round(self._seconds(), 3),
        }
        self.run.metric("train", self.done, **values)
        self._logger.log(self.done, {f"train/{key}": value for key, value in values.items()})

    def _evaluate(self, meter: loggers.Meter) -> None:
        """Evaluate on dev where the plan says so; keep the best. The metrics line, last, seals the checkpoints."""
        every, last = self.config.eval_every, self.done == self.config.steps
        due = self.done == 0 or last or (every > 0 and self.done % every == 0)
        if due and self.done not in self._evaluated:
            seen = evaluate(self.session, self.dev_rows)
            if self._rank(self.done, seen.score):
                self._save("best")
            if last or self.config.checkpoint_every == 0:
                self._save("last")
            self.run.metric("eval", self.done, split="dev", **seen.line(), seconds=round(self._seconds(), 3))
            self._evaluated.add(self.done)
            self._logger.log(self.done, {"dev/loss": seen.loss, "dev/accuracy": seen.accuracy})
            meter.dev(seen.accuracy)
            told = (self.done, 100 * seen.accuracy, seen.loss, _share(seen))
            log.info("step %d  dev accuracy %.1f%%  loss %.4f  %s", *told)
        elif self.config.checkpoint_every and self.done % self.config.checkpoint_every == 0 and self.done:
            self._save("last")

    def _rank(self, step: int, value: float) -> bool:
        """Keep the best dev score; the earlier step wins a tie."""
        if self.best is not None and value <= self.best[1]:
            return False
        self.best = (step, value)
        return True

    def _save(self, name: str) -> None:
        if self.config.checkpoint == "full":
            self.run.save(name, self.done, lambda folder: models.save(self.session.loaded, folder))

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def finish(self, test_rows: list[Encoded] | None) -> dict[str, Any]:
        """Evaluate the best checkpoint on test and write the summary."""
        self._file.close()
        seconds, (best, _) = self._seconds(), self.best or (0, 0.0)
        past = trajectory.read(self.run.path / "trajectory.bin")
        at_best = next(m for m in self.run.evaluations("dev") if m["step"] == best)
        test = None
        if test_rows is not None:
            session = self.session if best == self.done else weights_at(self.config, self.run, best)
            seen = evaluate(session, test_rows)
            self.run.metric("eval", best, split="test", **seen.line(), seconds=round(self._seconds(), 3))
            test = {"accuracy": seen.accuracy, "loss": seen.loss} | (
                {} if seen.metric == "accuracy" else {seen.metric: seen.score}
            )
        summary = {
            "steps": self.done,
            "forwards": 2 * self.config.optimizer.samples * self.done,
            "seconds": round(seconds, 3),
            "best": {"step": best, "accuracy": at_best["accuracy"]},
            "dev": {key: at_best[key] for key in ("accuracy", "loss", self.config.task.metric)},
            "test": test,
            "projected_grad": _gradient_facts(past.grads),
            "peak_memory_bytes": peak_memory(self.session.loaded.device),
        }
        self.run.summary(summary)
        self._logger.close()
        return summary


@torch.no_grad()
def evaluate(session: Session, rows: list[Encoded]) -> Evaluation:
    """Judge all rows. Batches go by length, so that little padding is computed; the result does not depend on it."""
    config = session.config
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    logits = torch.empty(len(rows), len(config.task.labels))
    size = config.eval_batch_size
    for start in range(0, len(rows), size):
        chosen = order[start : start + size]
        logits[chosen] = session.objective.logits(session.batch([rows[i] for i in chosen])).cpu()
    labels = torch.tensor([row.label for row in rows])
    predicted = logits.argmax(dim=-1)
    loss = float(LOSSES[config.objective.loss](logits, labels))
    if not math.isfinite(loss):
        raise RunFailed("an evaluation's loss is not finite: the weights have diverged; try a lower optimizer.lr")
    counts = Counter(predicted.tolist())
    return Evaluation(
        loss=loss,
        accuracy=float((predicted == labels).double().mean()),
        predicted={name: counts.get(i, 0) for i, name in enumerate(config.task.labels)},
        score=score(config.task.metric, labels.tolist(), predicted.tolist()),
        metric=config.task.metric,
    )


class Order:
    """Which rows make up each batch: passes over a fresh shuffle each, drawn uniformly, never by length.

    The batch of a step is a function of (rows, batch size, seed, step) alone, so a resumed run sees the same ones.
    A batch larger than the data is all of the data.
    """

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self.rows, self.size, self.seed = rows, min(batch_size, rows), seed
        self._passes: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (from 0)."""
        places = range(step * self.size, (step + 1) * self.size)
        return [int(self._pass(place // self.rows)[place % self.rows]) for place in places]

    def _pass(self, number: int) -> np.ndarray:
        if number not in self._passes:
            self._passes = {k: v for k, v in self._passes.items() if k == number - 1}
            # RandomState's streams are frozen for good, those of numpy's newer generators are not.
            self._passes[number] = np.random.RandomState([self.seed, number]).permutation(self.rows)
        return self._passes[number]


def load_data(config: Config) -> Splits:
    """Load the splits and say what is odd about them; training needs rows in train and dev."""
    splits = data.load(config.task, config.data, config.data.seed if config.data.seed is not None else config.seed)
    for note in splits.notes:
        log.warning(note)
    for name, rows in (("train", splits.train), ("dev", splits.dev)):
        if not rows:
            raise UserError(f"the {name} split of task {config.task.name} (data={config.data.name}) is empty")
    return splits


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of the allocator on a GPU, of the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    """Return the device with its model, e.g. `cuda (NVIDIA H100)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def _gradient_facts(grads: np.ndarray) -> dict[str, float | None]:
    """Say how the projected gradients were distributed; null for a run of no steps."""
    if grads.size == 0:
        return {"zero_fraction": None, "mean_abs": None, "min_abs": None, "max_abs": None}
    size = np.abs(grads.astype(np.float64))
    facts = {"zero_fraction": (size == 0).mean(), "mean_abs": size.mean(), "min_abs": size.min(), "max_abs": size.max()}
    return {key: float(value) for key, value in facts.items()}


def _share(seen: Evaluation) -> str:
    total = sum(seen.predicted.values())
    return "predicted " + ", ".join(f"{name} {100 * n / total:.0f}%" for name, n in seen.predicted.items())


def _announce(session: Session, splits: Splits, dead: list[str]) -> None:
    config, params = session.config, session.params
    test = "no test split" if splits.test is None else f"{len(splits.test)} test"
    log.info("data %s: %d train, %d dev, %s rows", config.data.name, len(splits.train), len(splits.dev), test)
    log.info(
        "model %s on %s: %s parameters in %d tensors tuned",
        config.model.path,
        device_name(session.loaded.device),
        f"{params.count:,}",
        len(params.tensors),
    )
    if dead:
        log.info("not tuned, since they cannot reach the loss: %s", ", ".join(dead))
