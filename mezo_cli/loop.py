"""One run: train(config, run). It reads from top to bottom."""

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from mezo_cli import data, loggers, machine, models, precision, probing, terminal, weights
from mezo_cli.data.fewshot import limit
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.evaluation import Evaluation, evaluate
from mezo_cli.models import adapters
from mezo_cli.optim import FirstOrder, Mezo, StepResult, not_finite
from mezo_cli.order import Order
from mezo_cli.runs import Run, trajectory
from mezo_cli.schema import Config, Encoded, Splits
from mezo_cli.session import Session, prepare

log = logging.getLogger("mezo")

TRAIN_ROWS = 1000  # of train, drawn evenly, that the best checkpoint is judged on at the end


def train(config: Config, run: Run, console: Console) -> dict[str, Any]:
    """Train, evaluate and write the run directory; return the summary. A run that was interrupted goes on.

    Raises:
        UserError: before training begins, for anything the user can mend.
        RunFailed: when the loss is not finite, or the run directory cannot be written.
    """
    splits = load_data(config)
    _check_same_data(run, splits)
    done = _done(config, run)
    session = prepare(config) if done is None else weights.resumed(config, run, done)
    machine.forget_peak_memory(session.loaded.device)
    train_rows, dev_rows = (session.inputs.encode_all(rows) for rows in (splits.train, splits.dev))
    test_rows = None if splits.test is None else session.inputs.encode_all(splits.test)
    dead = _tune_live(session, train_rows)
    device = machine.device_name(session.loaded.device)
    run.update(device=device, data_fingerprint=splits.fingerprint, trainable=session.tuned())
    _announce(session, splits, dead)
    if done is None and config.init == "linear_probe":
        run.update(probe=probing.probe(session, train_rows))
    if done is None and config.steps and config.method.trajectory:
        precision.warn(session, session.batch([train_rows[i] for i in Order.of(config, train_rows).batch(0)]))
    with closing(Course(session, run, dev_rows, done)) as course, torch.no_grad(), _memory_told(config):
        del session  # the course's own from here on: it lets go of it for the best one
        with terminal.meter(console, config.steps, course.done) as meter:
            course.go(train_rows, meter)
        return course.finish(train_rows, test_rows)


class Course:
    """The training of one run: its steps, its evaluations, the best so far. `done`: what an interrupted run did."""

    def __init__(self, session: Session, run: Run, dev_rows: list[Encoded], done: int | None) -> None:
        self.session, self.run, self.dev_rows = session, run, dev_rows
        self.config = session.config
        self.done = done or 0
        self.best: tuple[int, float] | None = None  # step, score
        self._before = 0.0  # seconds of earlier sessions of this run
        self._evaluated: set[int] = set()
        self._logger = loggers.make(self.config.logger, run.path)
        if done is None:
            loaded = session.loaded
            models.keep(loaded.model, loaded.fresh, run.start_file, loaded.fresh_rows)
        else:
            self._recall()
            log.info("resumed at step %d of %d", self.done, self.config.steps)
        self._writer = self._open_trajectory(going_on=done is not None) if self.config.method.trajectory else None
        self._began = time.perf_counter()

    def _open_trajectory(self, going_on: bool) -> trajectory.Writer:
        if going_on:
            past = trajectory.read(self.run.trajectory)
            return trajectory.Writer(self.run.open_trajectory(past.sound), past.header, past.crc)
        optimizer = self.config.optimizer
        header = trajectory.Header(
            fingerprint=models.fingerprint(self.session.loaded.model),
            optimizer=optimizer.name,
            noise=optimizer.noise,
            seed=self.config.seed,
            samples=optimizer.samples,
            weight_decay=optimizer.weight_decay,
            tensors=[(name, list(p.shape)) for name, p in self.session.params.tensors.items()],
            settings={key: getattr(optimizer, key) for key in self.config.method.reads} | {"steps": self.config.steps},
        )
        return trajectory.Writer(self.run.open_trajectory(), header)

    def _recall(self) -> None:
        """Take up the metrics of an interrupted run; what it wrote past its last step is cut, to be written again."""
        self.run.cut_metrics(self.done)
        self._before = max((float(line["seconds"]) for line in self.run.metrics()), default=0.0)
        for line in self.run.evaluations("dev"):
            self._evaluated.add(line["step"])
            self._rank(line["step"], line[self.config.task.metric])
        for step in range(self.done):
            if self.config.evaluates_at(step) and step not in self._evaluated:
                raise UserError(f"{self.run.path / 'metrics.jsonl'} is damaged: it lacks the evaluation of step {step}")

    def go(self, train_rows: list[Encoded], meter: terminal.Meter) -> None:
        """Step until the end, evaluating every `eval_every` steps, before the first and after the last."""
        config, session = self.config, self.session
        order = Order.of(config, train_rows)
        self._evaluate(meter)
        for step in range(self.done, config.steps):
            result = session.step([train_rows[i] for i in order.batch(step)], step)
            self._check_finite(step, result)
            # The metrics line goes first: a crash between the two repeats the step, and cuts its line.
            if (step + 1) % config.log_every == 0 or step + 1 == config.steps:
                self._log(step + 1, result)
            if self._writer is not None:
                self._writer.append(step, result.projected_grads, result.lr)
            machine.give_back_freed_memory()
            self.done = step + 1
            meter.step(self.done, result.loss)
            self._evaluate(meter)

    def _check_finite(self, step: int, result: StepResult) -> None:
        wrong, optimizer = not_finite(result), self.config.optimizer
        if wrong:
            other = f" or another optimizer.eps (now {optimizer.eps:g})" if "eps" in self.config.method.reads else ""
            raise RunFailed(
                f"step {step + 1}: the loss is not finite ({wrong}); try a lower optimizer.lr (now "
                f"{optimizer.lr:g}){other}"
            )

    def _log(self, step: int, result: StepResult) -> None:
        values = {**result.scalars(), "seconds": round(self._seconds(), 3)}
        self.run.metric("train", step, **values)
        self._logger.log(step, {f"train/{key}": value for key, value in values.items()})

    def _evaluate(self, meter: terminal.Meter) -> None:
        """Evaluate on dev where the plan says so, and save. The metrics line, last, seals the checkpoints."""
        config, step = self.config, self.done
        if config.evaluates_at(step) and step not in self._evaluated:
            seen = self._judged(self.session, self.dev_rows)
            better, planned = self._rank(step, seen.score), config.checkpoint_every == 0 or step == config.steps
            # Without a trajectory a run goes on from `last` alone: the best must never lie ahead of it.
            if planned or step % config.checkpoint_every == 0 or (better and not config.method.trajectory):
                self._save("last")
            if better:
                self._save("best")
            self.run.metric("eval", step, split="dev", **seen.line(), seconds=round(self._seconds(), 3))
            self._evaluated.add(step)
            self._logger.log(step, {f"dev/{key}": value for key, value in seen.scores().items()})
            meter.dev(step, seen.accuracy, seen.told())
        elif config.checkpoint_every and step % config.checkpoint_every == 0:
            self._save("last")

    def _judged(self, session: Session, rows: list[Encoded]) -> Evaluation:
        seen = evaluate(session, rows)
        if not seen.finite and self.done == 0:
            raise UserError(f"model.path={self.config.model.path}: its loss is not finite before the first step")
        if not seen.finite:
            raise RunFailed(
                f"step {self.done}: the loss of the evaluation is not finite: the weights have diverged; try a lower "
                f"optimizer.lr (now {self.config.optimizer.lr:g})"
            )
        return seen

    def _rank(self, step: int, value: float) -> bool:
        """Keep the best dev score; the earlier step wins a tie."""
        if self.best is not None and value <= self.best[1]:
            return False
        self.best = (step, value)
        return True

    def _save(self, name: str) -> None:
        if self.config.checkpoint == "full" and self.run.saved_step(name) != self.done:
            self.run.save(name, self.done, lambda folder: self._write(folder, name))

    def _write(self, folder: Path, name: str) -> None:
        models.save(self.session.loaded, folder)
        if name == "last" and isinstance(self.session.optimizer, FirstOrder):
            self.session.optimizer.save(folder / weights.STATE)

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def finish(self, train_rows: list[Encoded], test_rows: list[Encoded] | None) -> dict[str, Any]:
        """Evaluate the best checkpoint on train (at most `TRAIN_ROWS` of it) and on test, and write the summary."""
        seconds, (best, _) = self._seconds(), self.best or (0, 0.0)
        at_best = next(m for m in self.run.evaluations("dev") if m["step"] == best)
        metric = self.config.task.metric
        passes, probed = self.session.optimizer.passes(self.done), self.run.info().get("probe", {})
        passes["forwards"] += probed.get("forwards", 0)
        if best != self.done:
            del self.session  # there may be no room for two
            gc.collect()
            self.session = weights.at_step(self.config, self.run, best)
        train_rows = limit(train_rows, TRAIN_ROWS)
        train = self._at_end("train", best, train_rows)
        test = None if test_rows is None else self._at_end("test", best, test_rows)
        summary = {
            "steps": self.done,
            **passes,
            "seconds": round(seconds, 3),
            "best": {"step": best, "accuracy": at_best["accuracy"]},
            "dev": {key: at_best[key] for key in dict.fromkeys(("accuracy", "loss", metric))},
            "train": {**train, "rows": len(train_rows)},
            "test": test,
            "projected_grad": trajectory.facts(self._grads()),
            "peak_memory_bytes": machine.peak_memory(self.session.loaded.device),
        } | ({"probe": probed} if probed else {})
        self.run.summary(summary)
        return summary

    def _grads(self) -> np.ndarray | None:
        """Every projected gradient of the run; where samples grow over it a record has some that were never drawn."""
        if not isinstance(self.session.optimizer, Mezo):
            return None
        grads, drawn = trajectory.read(self.run.trajectory).grads, self.session.optimizer.samples
        return grads[np.arange(grads.shape[1]) < np.array([[drawn(step)] for step in range(len(grads))], int)]

    def _at_end(self, split: str, best: int, rows: list[Encoded]) -> dict[str, float]:
        """Judge the best checkpoint on a split, and record it."""
        seen = self._judged(self.session, rows)
        self.run.metric("eval", best, split=split, **seen.line(), seconds=round(self._seconds(), 3))
        return seen.scores()

    def close(self) -> None:
        """Close what was opened, however the run ended."""
        if self._writer is not None:
            self._writer.close()
        self._logger.close()


def _tune_live(session: Session, rows: list[Encoded]) -> list[str]:
    """Leave out the parameters that cannot reach the loss; return their names."""
    return session.params.keep_live(lambda: session.objective.logits(session.batch(rows[:1])))


def load_data(config: Config) -> Splits:
    """Load the splits and say what is odd about them."""
    splits = data.load(config.task, config.data, config.data.seed if config.data.seed is not None else config.seed)
    for note in splits.notes:
        log.warning("note   %s", note)
    return splits


@contextmanager
def _memory_told(config: Config) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ")[0]
        sizes = f"batch_size (now {config.batch_size}) or eval_batch_size (now {config.eval_batch_size})"
        raise RunFailed(f"out of memory: {said}; try a lower {sizes}") from error


def _check_same_data(run: Run, splits: Splits) -> None:
    """Refuse to go on with other rows than the run began with."""
    before = run.info().get("data_fingerprint")
    if before not in (None, splits.fingerprint):
        raise UserError(f"{run.path}: the data have changed since this run began, so it cannot be resumed")


def _done(config: Config, run: Run) -> int | None:
    """Return the step that an interrupted run can go on from, None where it never began."""
    if config.method.trajectory:
        needed = run.trajectory
        done = len(trajectory.read(needed)) if needed.exists() and needed.stat().st_size else None
    else:
        needed = run.checkpoints / "last"
        done = run.saved_step("last")
    if done is None and run.metrics():
        raise UserError(f"{needed} is missing: the run cannot be resumed without it")
    return done


def _announce(session: Session, splits: Splits, dead: list[str]) -> None:
    config, params = session.config, session.params
    test = "no test split" if splits.test is None else f"{len(splits.test)} test"
    log.info("data   %s: %d train, %d dev, %s", config.data.name, len(splits.train), len(splits.dev), test)
    tuned = session.tuned()
    log.info(
        "model  %s on %s: %s parameters (%.3g%%) in %d tensor%s tuned",
        config.model.path,
        machine.device_name(session.loaded.device),
        f"{tuned['count']:,}",
        100 * tuned["share"],
        len(params.tensors),
        " is" if len(params.tensors) == 1 else "s are",
    )
    if config.peft.name != "none":
        log.info("peft   %s: %s", config.peft.name, adapters.told(tuned["names"]))
    if dead:
        log.info("not tuned, since they cannot reach the loss: %s", ", ".join(dead))
