"""The state of one training run, and what it writes to the run directory."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from mezo_cli import models
from mezo_cli.config.keys import type_hints
from mezo_cli.config.schema import Config
from mezo_cli.console import ProgressReporter, describe_completion, format_score, progress_bar
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import RunFailed, RunStopped, UserError, one_line
from mezo_cli.objectives.evaluation import Evaluation
from mezo_cli.optim import StepResult, not_finite, optimizer_class
from mezo_cli.optim.settings import CLIP_SETTINGS, PerturbationConfig, zeroth_order
from mezo_cli.perturb.noise import Noise
from mezo_cli.runs import Run, trajectory
from mezo_cli.training import agreement, restore
from mezo_cli.training.forgetting import Forgetting
from mezo_cli.training.load import EncodedRows
from mezo_cli.training.loggers.base import RunEnd, RunLoggers, Status, final_scalars
from mezo_cli.training.session import Session
from mezo_cli.training.verdict import DIVERGED, Divergence, Evaluations, best_step, dev_evaluations

log = logging.getLogger("mezo")

TEST_BEFORE = "test_before"  # the split of the evaluation on test before training, in metrics.jsonl: it is no result
SYNC_SECONDS = 30.0  # the most that a power cut can cost between two evaluations


class TrainingRun:
    """State of one training run: current step, scores on dev, and the open log and trajectory files.

    It is a context manager that closes the files. The model is not part of it: the methods that need one take the
    `Session`. Each of the ranks that share a run has one; `run` writes on rank 0 alone.

    Attributes:
        step: steps done.
        dev: every evaluation on dev so far.
        best_step: the step of the best of them, see `verdict.best_step`.
        untrained: split -> values of its evaluation before the first step, [rows, values]; empty if they are not known.
        divergence: whether the run has diverged.
        stop_reason: what ended the run before its last step, see `find_stop_reason`.
        forgetting: compares the weights of each evaluation on dev with those of the start; None: they are not.
        summary: the content of summary.json; empty until the run has finished, and on a rank other than 0.
    """

    def __init__(
        self,
        config: Config,
        run: Run,
        ranks: Ranks | None = None,
        prunes: Callable[[Evaluations], bool] | None = None,
    ) -> None:
        self.config, self.run, self.ranks, self._prunes = config, run, ranks, prunes
        self._optimizer_class = optimizer_class(config.optimizer)
        self.step = 0
        self.dev: dict[int, Mapping[str, Any]] = {}
        self.untrained: dict[str, Tensor] = {}
        self._has_test_before = False  # whether metrics.jsonl has the evaluation on test before training
        self.best_step, self._since_best = 0, 0  # evaluations since then, for patience
        self.divergence, self._warned = Divergence(), False
        setting = config.stop_on_divergence  # null: how the run was started decides, which run.json says
        self._stops_on_divergence = bool(run.info().get("stop_on_divergence") if setting is None else setting)
        self.stop_reason: str | None = None
        self._loggers = RunLoggers(config, run)
        self.forgetting: Forgetting | None = None
        self.summary: dict[str, Any] = {}
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
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # every record was flushed
            if self._trajectory is not None:
                self._trajectory.close()
        self._loggers.close(self._end(error))

    def _end(self, error: BaseException | None) -> RunEnd:
        """Return how the run ended, for its loggers."""
        if error is None:
            return RunEnd("finished", self.step, summary=final_scalars(self.summary))
        interrupted = isinstance(error, KeyboardInterrupt)
        status: Status = "interrupted" if interrupted or isinstance(error, RunStopped) else "failed"
        return RunEnd(status, self.step, "interrupted" if interrupted else one_line(error))

    def seconds(self) -> float:
        """Return the training time so far, without the time between an interruption and the resumption."""
        return self._seconds_before + time.perf_counter() - self._start_time

    # --- start ---

    def start(self, session: Session) -> None:
        """Begin a new run: save the initial weights that the base model does not have, and begin the trajectory."""
        loaded = session.loaded
        self.run.save_initial_state(
            lambda path: models.save_initial_state(loaded.model, loaded.fresh, path, loaded.fresh_rows)
        )
        fingerprint = models.fingerprint(loaded.model)
        self.run.update(weights_fingerprint=fingerprint)
        if session.optimizer.replayable:
            session.optimizer.keep_start(lambda: session.params)
            header = _make_header(session, fingerprint)
            self._trajectory = trajectory.Writer(self.run.open_trajectory(), header)
            self._trajectory.sync()
        self._loggers.open()
        self._start_time = time.perf_counter()

    def resume(self, step: int) -> None:
        """Continue an interrupted run at `step`. What it wrote after that step is dropped, to be written again."""
        self.step = self._first_step = step
        if step and self.run.writes:
            scores = self.run.read_untrained() or {}
            self.untrained = {name: torch.tensor(rows) for name, rows in scores.items()}
        logged = self._logged_steps()
        self.run.truncate_metrics(step)
        if self.ranks is not None:
            self.ranks.from_first("truncated")
        lines = self.run.metrics()
        self.dev = dev_evaluations(self.config, self.run, lines, stop=step)
        if self.dev:
            self.best_step = best_step(self.config, self.dev)
            self._since_best = sum(at > self.best_step for at in self.dev)
        for line in lines:
            self._seconds_before = max(self._seconds_before, float(line["seconds"]))
            self.divergence.add(line)
            self._warned = self._warned or self.divergence.reason is not None
            self._has_test_before = self._has_test_before or line.get("split") == TEST_BEFORE
        log.info("resumed at step %d of %d", step, self.config.steps)
        if self._optimizer_class.replayable:
            past = trajectory.read(self.run.trajectory)
            file = self.run.open_trajectory(past.bytes_until(step))
            self._trajectory = trajectory.Writer(file, past.header, past.crc)
        self._loggers.open(step, logged)
        self._start_time = time.perf_counter()

    def _logged_steps(self) -> dict[str, int]:
        """Return `train` and `dev` -> the step of the last line of that kind: the loggers had the scalars up to it."""
        steps: dict[str, int] = {}
        for line in self.run.read_valid_metrics()[0]:
            if line["kind"] == "train" or line["split"] == "dev":
                steps["train" if line["kind"] == "train" else "dev"] = line["step"]
        return steps

    # --- after each step ---

    def record(self, result: StepResult, more: Mapping[str, float]) -> None:
        """Check the result of the current step, write its line of metrics.jsonl and its trajectory record.

        Args:
            result: of the step.
            more: the objective's figures of it, for metrics.jsonl.

        Raises:
            RunFailed: when a scalar of the result is not finite; nothing is written.
        """
        step = self.step + 1
        self._check_finite(step, result)
        # The metrics line is written first: after a crash between the two, the step is repeated and its line dropped.
        if self.config.logs_at(step):
            values = {**result.scalars(), **more, "seconds": round(self.seconds(), 3)}
            self.run.log_metrics("train", step, **values)
            self.divergence.add({"kind": "train", **values})
            self._loggers.log(step, {f"train/{key}": value for key, value in values.items()})
        if self._trajectory is not None:
            self._trajectory.append(self.step, result.recorded, result.lr)
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
            if isinstance(optimizer, PerturbationConfig):
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
        if self._stops_on_divergence and self.divergence.reason is not None:
            return "divergence"
        if config.patience is not None and self._since_best >= config.patience:
            return "patience"
        if self._prunes is not None and self.step and self.step in self.dev and self._prunes(self.dev):
            return "pruned"
        if config.max_seconds is None or self._first_stepped is None:
            return None
        is_over = time.perf_counter() - self._first_stepped >= config.max_seconds
        if self.ranks is not None:
            is_over = self.ranks.first_says(is_over)
        return "max_seconds" if is_over else None

    def stop(self, session: Session, reason: str, rows: list[Any], progress: ProgressReporter) -> None:
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
        self.stop_reason = reason
        log.info("%s: the best dev score is that of step %d", text, self.best_step)

    # --- evaluations and checkpoints ---

    def evaluate_and_save(
        self, session: Session, rows: list[Any], progress: ProgressReporter, is_last: bool = False
    ) -> None:
        """Evaluate on dev and save checkpoints, if they are due at the current step, or the run ends with it.

        The steps before are on the disk before the checkpoints are, and these before the evaluation's line: where the
        line is, they are complete. The line is on the disk before the next step.
        """
        config, step = self.config, self.step
        save_due = config.checkpoint_every > 0 and step % config.checkpoint_every == 0
        if (is_last or config.evaluates_at(step)) and step not in self.dev:
            if self.ranks is not None:
                agreement.repair_weights(session, self.run, step, self.ranks)
            evaluation = self._evaluate_or_fail(session, rows, progress.evaluation(len(rows)))
            if self.forgetting is not None:
                evaluation = evaluation.with_details(self.forgetting.measure(session))
            self._latest = step, evaluation
            is_best = self._add_to_dev(evaluation)
            # A method without a trajectory resumes from `last` alone, so `best` must never be ahead of it.
            keep_up = is_best and not self._optimizer_class.replayable
            self._sync()
            if config.checkpoint_every == 0 or save_due or step == config.steps or keep_up:
                self._save_checkpoint(session, "last")
            if is_best:
                self._save_checkpoint(session, "best")
            kept = [record for record in evaluation.records[: session.objective.kept_records] if record]
            if kept:
                self.run.log_completions(step, kept)
            self.log_evaluation("dev", step, evaluation)
            self.divergence.add({"kind": "eval", "split": "dev", **self.dev[step]})
            self.run.sync_metrics()
            scores = evaluation.scores()
            numbers = {key: value for key, value in evaluation.line().items() if isinstance(value, (int, float))}
            self._loggers.log(step, {f"dev/{key}": value for key, value in numbers.items()})
            progress.report_dev(step, format_score(config.chosen_metric, scores[config.chosen_metric]), evaluation.text)
            for record in kept[:1]:
                log.info("dev    %s", describe_completion(record))
        elif save_due:
            self._sync()
            self._save_checkpoint(session, "last")
        self._warn_of_divergence()

    def _warn_of_divergence(self) -> None:
        """Say once that the run has diverged."""
        if self._warned or self.divergence.reason is None:
            return
        self._warned = True
        log.warning(
            "warning: step %d: the run has diverged: %s; try a lower optimizer.lr (now %g)",
            *(self.step, self.divergence.reason, self.config.optimizer.lr),
        )

    def score_untrained(self, session: Session, rows: EncodedRows, console: Console) -> None:
        """Before the first step, score the rows that the result will be compared on, and store the scores.

        So a resumed run has them too. A run without steps is its own comparison.
        """
        if self.step or not self.config.steps or not self.config.test_at_start:
            return
        evaluations = {name: self.evaluate_best(session, name, split, console) for name, split in rows.splits().items()}
        self.untrained = {name: evaluation.values for name, evaluation in evaluations.items()}
        self.run.write_untrained({name: scores.tolist() for name, scores in self.untrained.items()})
        if "test" in evaluations and self.run.writes and not self._has_test_before:
            self.log_evaluation(TEST_BEFORE, 0, evaluations["test"])
            self.run.sync_metrics()

    def evaluate_best(self, session: Session, name: str, rows: list[Any], console: Console) -> Evaluation:
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
        rows: list[Any],
        report: Callable[[int], None],
    ) -> Evaluation:
        evaluation = session.objective.evaluate(rows, report, session.ranks)
        if not evaluation.is_finite and self.step == 0:
            raise not_finite_at_start(self.config)
        if not evaluation.is_finite:
            self.run.update(verdict=DIVERGED)
            raise RunFailed(
                f"step {self.step}: the loss of the evaluation is not finite: the weights have diverged; try a lower "
                f"optimizer.lr (now {self.config.optimizer.lr:g})"
            )
        return evaluation

    def _add_to_dev(self, evaluation: Evaluation) -> bool:
        """Add the evaluation of the current step; return whether it is the best so far."""
        self.dev[self.step] = evaluation.line()
        is_best = best_step(self.config, self.dev) == self.step
        if is_best:
            self.best_step = self.step
        self._since_best = 0 if is_best else self._since_best + 1
        return is_best

    def log_evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """Write the line of an evaluation."""
        self.run.log_metrics("eval", step, split=split, **evaluation.line(), seconds=round(self.seconds(), 3))

    def _save_checkpoint(self, session: Session, name: str) -> None:
        def write(folder: Path) -> None:
            models.save(session.loaded, folder)
            if name == "last":
                session.optimizer.save_state(folder / restore.OPTIMIZER_STATE)

        if self.config.checkpoint == "full" and self.run.writes and self.run.checkpoint_step(name) != self.step:
            self.run.save_checkpoint(name, self.step, write)

    def exchanged_bytes_per_step(self) -> float:
        """Return how many bytes all ranks together have exchanged per step of this process; 0 in a process alone."""
        if self.ranks is None:
            return 0.0
        exchanged = self.ranks.exchanged["step"] - self._exchanged_before
        return round(exchanged / max(self.step - self._first_step, 1), 3)


def _make_header(session: Session, fingerprint: str) -> trajectory.Header:
    """Return the header of the trajectory that starts from the session's weights."""
    config, optimizer, params = session.config, session.optimizer, session.params
    drawn = zeroth_order(config.optimizer)
    names = [name for name in type_hints(type(config.optimizer)) if name not in ("name", *CLIP_SETTINGS)]
    return trajectory.Header(
        fingerprint=fingerprint,
        optimizer=config.optimizer.name,
        noise=drawn.noise,
        seed=config.seed,
        samples=drawn.directions,
        weight_decay=drawn.weight_decay,
        tensors=[(name, list(p.shape)) for name, p in params.tensors.items()],
        settings={name: getattr(config.optimizer, name) for name in names} | {"steps": config.steps},
        dtype=config.model.dtype,
        rounding=trajectory.ROUNDINGS[config.model.dtype],
        decay="float64" if drawn.weight_decay else None,
        scalars=optimizer.scalar,
        clip=drawn.clip_settings,
        nonnegative=[*params.nonnegative] or None,
    )


def not_finite_at_start(config: Config) -> UserError:
    """Return the error for a model whose loss is not finite before training."""
    return UserError(f"model.path={config.model.path}: its loss is not finite before the first step")
