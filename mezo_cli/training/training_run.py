"""The state of one training run, and what it writes to the run directory."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from mezo_cli import models, system
from mezo_cli.config.keys import type_hints
from mezo_cli.config.schema import Config, Example, TokenizedExample
from mezo_cli.console import ProgressReporter, progress_bar
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.distributed.shard_group import ShardGroup
from mezo_cli.errors import RunFailed, RunStopped, UserError, one_line
from mezo_cli.optim import StepResult, not_finite, optimizer_class
from mezo_cli.optim.settings import ZerothOrderConfig, zeroth_order
from mezo_cli.perturb.noise import Noise
from mezo_cli.runs import Run, trajectory
from mezo_cli.training import agreement, restore
from mezo_cli.training.comparison import ScoredRows, compare
from mezo_cli.training.evaluation import (
    Evaluation,
    best_step,
    evaluate,
    label_predictions,
    label_tensor,
    read_dev_scores,
)
from mezo_cli.training.loggers.active import ActiveLoggers, final_scalars
from mezo_cli.training.loggers.base import RunEnd, Status
from mezo_cli.training.setup import Session
from mezo_cli.training.verdict import DIVERGED, Divergence, verdict

log = logging.getLogger("mezo")

TEST_BEFORE = "test_before"  # the split of the evaluation on test before training, in metrics.jsonl: it is no result
SYNC_SECONDS = 30.0  # the most that a power cut can cost between two evaluations


@dataclass(frozen=True)
class EvaluatedRows:
    """The rows that a run is evaluated on at its begin and at its end.

    Attributes:
        train: at most 1,000 of train.
        dev: all of dev.
        test: all of test, None if there is no test split; `texts` are the same as texts.
    """

    train: list[TokenizedExample]
    dev: list[TokenizedExample]
    test: list[TokenizedExample] | None
    texts: list[Example] | None

    def splits(self) -> dict[str, list[TokenizedExample]]:
        """Return name -> rows of the splits that there are."""
        return {"train": self.train, "dev": self.dev} | ({} if self.test is None else {"test": self.test})


class TrainingRun:
    """State of one training run: current step, scores on dev, and the open log and trajectory files.

    It is a context manager that closes the files. The model is not part of it: the methods that need one take the
    `Session`. Each of the ranks that share a run has one; `run` writes on rank 0 alone.

    Attributes:
        step: steps done.
        dev_scores: step -> the task's metric on dev, for every evaluation so far.
        best_step: the step of the best of them; of equal scores the earliest.
    """

    def __init__(
        self, config: Config, run: Run, ranks: Ranks | None = None, prunes: Callable[[], bool] | None = None
    ) -> None:
        self.config, self.run, self._ranks, self._prunes = config, run, ranks, prunes
        self._optimizer_class = optimizer_class(config.optimizer)
        self.step = 0
        self.dev_scores: dict[int, float] = {}
        self.best_step, self._since_best = 0, 0  # evaluations since then, for patience
        self._divergence, self._warned = Divergence(), False
        asked = config.stop_on_divergence  # null: how the run was started decides, which run.json says
        self._stops_on_divergence = bool(run.info().get("stop_on_divergence") if asked is None else asked)
        self._stop_reason: str | None = None
        self._loggers = ActiveLoggers(config, run)
        self._summary: dict[str, Any] | None = None
        self._trajectory: trajectory.Writer | None = None
        self._start_time = time.perf_counter()
        self._kernels_recorded = False
        self._latest: tuple[int, Evaluation] | None = None  # step and evaluation on dev, of this process
        self._last_sync = self._start_time
        self._first_stepped: float | None = None  # when the first step of this process ended, for max_seconds
        self._seconds_before = 0.0  # training time before the run was interrupted
        self._first_step = 0  # of this process
        self._exchanged_before = 0 if ranks is None else ranks.exchanged["step"]

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # every record was flushed
            if self._trajectory is not None:
                self._trajectory.close()
        self._loggers.close(self._end(error))

    def _end(self, error: BaseException | None) -> RunEnd:
        """Return how the run ended, for its loggers."""
        if isinstance(error, KeyboardInterrupt):
            return RunEnd("interrupted", self.step, "interrupted")
        if error is not None:
            status: Status = "interrupted" if isinstance(error, RunStopped) else "failed"
            return RunEnd(status, self.step, one_line(error))
        return RunEnd("finished", self.step, summary=final_scalars(self._summary or {}))

    @property
    def _setting_names(self) -> list[str]:
        return [name for name in type_hints(type(self.config.optimizer)) if name != "name"]

    def seconds(self) -> float:
        """Return the training time so far, without the time between an interruption and the resumption."""
        return self._seconds_before + time.perf_counter() - self._start_time

    # --- start ---

    def start(self, session: Session) -> None:
        """Begin a new run: save the initial weights that the base model does not have, and begin the trajectory."""
        loaded, config = session.loaded, self.config
        self.run.save_initial_state(
            lambda path: models.save_initial_state(loaded.model, loaded.fresh, path, loaded.fresh_rows)
        )
        fingerprint = models.fingerprint(loaded.model, shards=loaded.shards)
        self.run.update(weights_fingerprint=fingerprint)
        if self._optimizer_class.replayable:
            drawn = zeroth_order(config.optimizer)
            header = trajectory.Header(
                fingerprint=fingerprint,
                optimizer=config.optimizer.name,
                noise=drawn.noise,
                seed=config.seed,
                samples=drawn.samples,
                weight_decay=drawn.weight_decay,
                tensors=[(name, list(p.shape)) for name, p in session.params.tensors.items()],
                settings={name: getattr(config.optimizer, name) for name in self._setting_names}
                | {"steps": config.steps},
                dtype=config.model.dtype,
                rounding=trajectory.ROUNDINGS[config.model.dtype],
                decay="float64" if drawn.weight_decay else None,
            )
            session.params.decay.in_float64 = header.decay is not None
            self._trajectory = trajectory.Writer(self.run.open_trajectory(), header)
            self._trajectory.sync()
        self._loggers.open()
        self._start_time = time.perf_counter()

    def resume(self, step: int) -> None:
        """Continue an interrupted run at `step`. What it wrote after that step is dropped, to be written again."""
        self.step = self._first_step = step
        if step and self.run.writes:
            self.run.read_untrained()  # damage is an error now, not after the training
        logged = self._logged_steps()
        self.run.truncate_metrics(step)
        if self._ranks is not None:
            self._ranks.from_first("truncated")
        self.dev_scores = read_dev_scores(self.config, self.run, stop=step)
        if self.dev_scores:
            self.best_step = best_step(self.dev_scores)
            self._since_best = sum(at > self.best_step for at in self.dev_scores)
        for line in self.run.metrics():
            self._seconds_before = max(self._seconds_before, float(line["seconds"]))
            self._divergence.add(line)
            self._warned = self._warned or self._divergence.reason is not None
        log.info("resumed at step %d of %d", step, self.config.steps)
        if self._optimizer_class.replayable:
            past = trajectory.read(self.run.trajectory)
            file = self.run.open_trajectory(past.bytes_until(step))
            self._trajectory = trajectory.Writer(file, past.header, past.crc)
        self._loggers.open(step, logged)
        self._start_time = time.perf_counter()

    def _logged_steps(self) -> dict[str, int]:
        """Return `train` and `dev` -> the step of the last line of that kind: the loggers had the scalars up to it."""
        found: dict[str, int] = {}
        for line in self.run.metrics_prefix()[0]:
            if line["kind"] == "train" or line["split"] == "dev":
                found["train" if line["kind"] == "train" else "dev"] = line["step"]
        return found

    # --- after each step ---

    def record(self, result: StepResult) -> None:
        """Check the result of the current step, write its line of metrics.jsonl and its trajectory record.

        Raises:
            RunFailed: when a scalar of the result is not finite; nothing is written.
        """
        step = self.step + 1
        self._check_finite(step, result)
        # The metrics line is written first: after a crash between the two, the step is repeated and its line dropped.
        if self.config.logs_at(step):
            values = {**result.scalars(), "seconds": round(self.seconds(), 3)}
            self.run.log_metrics("train", step, **values)
            self._divergence.add({"kind": "train", **values})
            self._loggers.log(step, {f"train/{key}": value for key, value in values.items()})
        if self._trajectory is not None:
            self._trajectory.append(self.step, result.projected_grads, result.lr)
        self.step = step
        if self._first_stepped is None:
            self._first_stepped = time.perf_counter()
        if time.perf_counter() - self._last_sync >= SYNC_SECONDS:
            self._sync()

    def record_kernels(self, noise: Noise) -> None:
        """Write to run.json, once, how the kernels of the noise run: that is known after a step."""
        if not self._kernels_recorded and self._optimizer_class.replayable:
            self._kernels_recorded = True
            self.run.update(noise_kernels=noise.describe_kernels()[0])

    def _check_finite(self, step: int, result: StepResult) -> None:
        wrong, optimizer = not_finite(result), self.config.optimizer
        if wrong:
            self.run.update(verdict=DIVERGED)
            other = ""
            if isinstance(optimizer, ZerothOrderConfig):
                other = f" or another optimizer.eps (now {optimizer.eps:g})"
            raise RunFailed(
                f"step {step}: the loss is not finite ({wrong}); try a lower optimizer.lr (now {optimizer.lr:g}){other}"
            )

    def find_stop_reason(self) -> str | None:
        """Return what ends the run before its last step: `divergence`, `patience`, `pruned`, `max_seconds`, or None.

        Every process takes one step at least, however low max_seconds is.
        """
        config = self.config
        if self.step >= config.steps:
            return None
        if self._stops_on_divergence and self._divergence.reason is not None:
            return "divergence"
        if config.patience is not None and self._since_best >= config.patience:
            return "patience"
        if self._prunes is not None and self.step and self.step in self.dev_scores and self._prunes():
            return "pruned"
        if config.max_seconds is None or self._first_stepped is None:
            return None
        is_over = time.perf_counter() - self._first_stepped >= config.max_seconds
        if self._ranks is not None:
            is_over = self._ranks.first_says(is_over)
        return "max_seconds" if is_over else None

    def stop(self, session: Session, reason: str, rows: list[TokenizedExample], progress: ProgressReporter) -> None:
        """End the run before its last step: evaluate on dev if it finishes now, save the weights, record the reason.

        Raises:
            RunStopped: for max_seconds with at_limit=stop; the run is not finished.
        """
        finishes = reason != "max_seconds" or self.config.at_limit == "finish"
        if finishes:
            self.evaluate_and_save(session, rows, progress, is_last=True)
        self._save_checkpoint(session, "last")
        self.run.update(stopped={"by": reason, "step": self.step})
        how = {
            "divergence": "because it diverged",
            "patience": f"by patience={self.config.patience}",
            "pruned": "by the pruner of its search",
            "max_seconds": f"after max_seconds={self.config.max_seconds:g}" if self.config.max_seconds else "",
        }
        text = f"stopped {how[reason]} at step {self.step} of {self.config.steps}"
        if not finishes:
            raise RunStopped(text)
        self._stop_reason = reason
        log.info("%s: the best dev score is that of step %d", text, self.best_step)

    # --- evaluations and checkpoints ---

    def evaluate_and_save(
        self, session: Session, rows: list[TokenizedExample], progress: ProgressReporter, is_last: bool = False
    ) -> None:
        """Evaluate on dev and save checkpoints, if they are due at the current step, or the run ends with it.

        The steps before are on the disk before the checkpoints are, and these before the evaluation's line: where the
        line is, they are complete. The line is on the disk before the next step.
        """
        config, step = self.config, self.step
        save_due = config.checkpoint_every > 0 and step % config.checkpoint_every == 0
        if (is_last or config.evaluates_at(step)) and step not in self.dev_scores:
            if self._ranks is not None:
                agreement.repair_weights(session, self.run, step, self._ranks)
            evaluation = self._evaluate_or_fail(session, rows, progress.evaluation(len(rows)))
            self._latest = step, evaluation
            is_best = self._update_best(evaluation.score)
            # A method without a trajectory resumes from `last` alone, so `best` must never be ahead of it.
            keep_up = is_best and not self._optimizer_class.replayable
            self._sync()
            if config.checkpoint_every == 0 or save_due or step == config.steps or keep_up:
                self._save_checkpoint(session, "last")
            if is_best:
                self._save_checkpoint(session, "best")
            self._log_evaluation("dev", step, evaluation)
            self._divergence.add({"kind": "eval", "split": "dev", **evaluation.metrics()})
            self.run.sync_metrics()
            self._loggers.log(step, {f"dev/{key}": value for key, value in evaluation.scores().items()})
            progress.report_dev(step, evaluation.accuracy, evaluation.summary())
        elif save_due:
            self._sync()
            self._save_checkpoint(session, "last")
        self._warn_of_divergence()

    def _warn_of_divergence(self) -> None:
        """Say once that the run has diverged."""
        if self._warned or self._divergence.reason is None:
            return
        self._warned = True
        log.warning(
            "warning: step %d: the run has diverged: %s; try a lower optimizer.lr (now %g)",
            *(self.step, self._divergence.reason, self.config.optimizer.lr),
        )

    def score_untrained(self, session: Session, rows: EvaluatedRows, console: Console) -> None:
        """Before the first step, score the rows that the result will be compared on, and store the scores.

        So a resumed run has them too. A run without steps is its own comparison.
        """
        if self.step or not self.config.steps or not self.config.test_at_start:
            return
        found = {name: self._evaluate(session, name, split, console) for name, split in rows.splits().items()}
        self.run.write_untrained({name: evaluation.logits.tolist() for name, evaluation in found.items()})
        if "test" in found and self.run.writes and not self.run.evaluations(TEST_BEFORE):
            self._log_evaluation(TEST_BEFORE, 0, found["test"])
            self.run.sync_metrics()

    def _evaluate(self, session: Session, name: str, rows: list[TokenizedExample], console: Console) -> Evaluation:
        """Evaluate a session at the best step on a split; on dev, what this process has evaluated there is taken."""
        if name == "dev" and self._latest is not None and self._latest[0] == self.best_step:
            return self._latest[1]
        with progress_bar(console, f"{name} rows", len(rows)) as report:
            return self._evaluate_or_fail(session, rows, report)

    def _sync(self) -> None:
        """Wait until the steps so far are on the disk: they survive a power cut."""
        if self._trajectory is not None:
            self._trajectory.sync()
        self.run.sync_metrics()
        self._last_sync = time.perf_counter()

    def _evaluate_or_fail(
        self,
        session: Session,
        rows: list[TokenizedExample],
        report: Callable[[int], None],
    ) -> Evaluation:
        evaluation = evaluate(session, rows, report)
        if not evaluation.is_finite and self.step == 0:
            raise not_finite_at_start(self.config)
        if not evaluation.is_finite:
            self.run.update(verdict=DIVERGED)
            raise RunFailed(
                f"step {self.step}: the loss of the evaluation is not finite: the weights have diverged; try a lower "
                f"optimizer.lr (now {self.config.optimizer.lr:g})"
            )
        return evaluation

    def _update_best(self, score: float) -> bool:
        """Add the score of the current step; return whether it is the best so far."""
        is_best = not self.dev_scores or score > self.dev_scores[self.best_step]
        self.dev_scores[self.step] = score
        if is_best:
            self.best_step = self.step
        self._since_best = 0 if is_best else self._since_best + 1
        return is_best

    def _log_evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        self.run.log_metrics("eval", step, split=split, **evaluation.metrics(), seconds=round(self.seconds(), 3))

    def _save_checkpoint(self, session: Session, name: str) -> None:
        def write(folder: Path) -> None:
            models.save(session.loaded, folder)
            if name == "last" and session.shard_group is None:
                session.optimizer.save_state(folder / restore.OPTIMIZER_STATE)

        if self.config.checkpoint != "full":
            return
        if session.shard_group is not None:
            self._save_shards(session.shard_group, session, name, write)
        elif self.run.writes and self.run.checkpoint_step(name) != self.step:
            self.run.save_checkpoint(name, self.step, write)

    def _save_shards(self, group: ShardGroup, session: Session, name: str, write: Callable[[Path], None]) -> None:
        """Save a checkpoint of which every rank holds a part: rank 0 writes what the others send.

        No rank looks whether it is there already: it may change between two looks. Moments are not stored: they follow
        from the trajectory.
        """
        if group.rank == 0:
            self.run.save_checkpoint(name, self.step, write)
        else:
            models.save(session.loaded, None)
        group.barrier()  # until the new checkpoint is in its place

    # --- end ---

    def finish(
        self,
        session: Session,
        rows: EvaluatedRows,
        seconds: float,
        console: Console,
    ) -> dict[str, Any]:
        """Evaluate the best step, write predictions.jsonl and summary.json, and return the summary.

        A rank other than 0 helps to evaluate, and returns an empty summary.

        Args:
            session: at the weights of the best step.
            rows: to evaluate on.
            seconds: the training time.
            console: where progress is shown.
        """
        best = self.best_step
        evaluations = {name: self._evaluate(session, name, split, console) for name, split in rows.splits().items()}
        if not self.run.writes:
            return {}
        for split in ("train", "test"):
            if split in evaluations:
                self._log_evaluation(split, best, evaluations[split])
        if "test" in evaluations:
            self._write_predictions(rows.texts or [], evaluations["test"])
        scores = self._summarise_scores(rows, evaluations)
        passes, probe = session.optimizer.passes(self.step), self.run.info().get("probe", {})
        passes["forwards"] += probe.get("forwards", 0)
        grads, optimizer = None, session.optimizer
        if optimizer.replayable:
            grads = trajectory.read(self.run.trajectory).drawn_grads(optimizer.samples)
        summary = {
            "steps": self.step,
            **passes,
            "seconds": round(seconds, 3),
            "verdict": verdict(self._divergence.reason is not None, best, self.step),
            "best": {"step": best, "accuracy": scores["dev"]["accuracy"]},
            **scores,
            "projected_grad": trajectory.projected_grad_stats(grads),
            "peak_memory_bytes": system.peak_memory(session.loaded.device),
        } | ({"probe": probe} if probe else {})
        if self._stop_reason is not None:
            summary["stopped"] = self._stop_reason
        if self._ranks is not None:
            summary["distributed"] = self._describe_ranks(self._ranks)
        self.run.write_summary(summary)
        self._summary = summary
        return summary

    def _describe_ranks(self, ranks: Ranks) -> dict[str, Any]:
        """Return what the ranks of this process shared, and how many bytes all of them exchanged per step."""
        exchanged = ranks.exchanged["step"] - self._exchanged_before
        per_step = round(exchanged / max(self.step - self._first_step, 1), 3)
        log.info(
            "ranks  %d ranks shared the %s of a step, and exchanged %g bytes for it", ranks.size, ranks.split, per_step
        )
        return {"ranks": ranks.size, "split": ranks.split, "bytes_per_step": per_step}

    def _summarise_scores(self, rows: EvaluatedRows, evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
        """Return `dev`, `train` and `test` of the best step, and what they are compared with, for summary.json."""
        compared = self._compare(rows, evaluations)
        intervals, test = compared.pop("intervals"), evaluations.get("test")
        # What chose the best step, which may differ in the last bits from the same weights restored.
        dev = next(line for line in self.run.evaluations("dev") if line["step"] == self.best_step)
        names = dict.fromkeys(("accuracy", "loss", self.config.task.metric))
        return {
            "dev": {**{name: dev[name] for name in names}, "intervals": intervals["dev"]},
            "train": {**evaluations["train"].scores(), "rows": len(rows.train)},
            "test": None if test is None else {**test.scores(), "intervals": intervals["test"]},
            **compared,
        }

    def _compare(self, rows: EvaluatedRows, evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
        """Return what `compare` says of the best step's evaluations beside the scores before training."""
        after = {name: evaluation.logits for name, evaluation in evaluations.items()}
        before: Mapping[str, Tensor] = {}
        if self.config.test_at_start and not self.config.steps:
            before = after
        elif self.config.test_at_start:
            stored = self.run.read_untrained()
            if stored is None:
                log.warning("warning: the result is not compared with the untrained model: there is no untrained.json")
            before = {name: torch.tensor(scores) for name, scores in (stored or {}).items()}
        splits = rows.splits()
        scored = {name: ScoredRows(label_tensor(splits[name]), after[name], before.get(name)) for name in splits}
        return compare(self.config, scored)

    def _write_predictions(self, texts: list[Example], evaluation: Evaluation) -> None:
        task, predictions = self.config.task, label_predictions(evaluation.logits, self.config.task.labels)
        self.run.write_predictions(
            {
                "columns": dict(zip(task.columns, row.texts, strict=True)),
                "label": task.labels[row.label],
                **prediction,
            }
            for row, prediction in zip(texts, predictions, strict=True)
        )


def not_finite_at_start(config: Config) -> UserError:
    """Return the error for a model whose loss is not finite before training."""
    return UserError(f"model.path={config.model.path}: its loss is not finite before the first step")
