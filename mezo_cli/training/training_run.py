"""The state of one training run: its step, what it has scored, and when it ends."""

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from mezo_cli import models
from mezo_cli.config.optimizers import CLIP_SETTINGS, PerturbationConfig, zeroth_order
from mezo_cli.config.schema import Config
from mezo_cli.console import ProgressReporter, describe_completion, format_score, progress_bar
from mezo_cli.distributed.ranks import ALONE, Ranks
from mezo_cli.errors import RunFailed, RunStopped, UserError, did_you_mean, join
from mezo_cli.objectives.scoring import Evaluation
from mezo_cli.optim import StepResult, not_finite
from mezo_cli.perturb.noise import Noise
from mezo_cli.runs import Run, trajectory
from mezo_cli.training import agreement
from mezo_cli.training.best_step import BestStep
from mezo_cli.training.divergence import Divergence
from mezo_cli.training.forgetting import Forgetting
from mezo_cli.training.load import EncodedRows
from mezo_cli.training.run_log import RunLog
from mezo_cli.training.session import Session
from mezo_cli.training.verdict import DIVERGED, dev_evaluations

log = logging.getLogger("mezo")

TEST_BEFORE = "test_before"  # the split of the evaluation on test before training, in metrics.jsonl: it is no result
UNTRAINED, LAST_DEV = "untrained.json", "last_dev.json"


class TrainingRun:
    """State of one training run. It is a context manager that closes the run's files.

    The model is not part of it: the methods that need one take the `Session`. Each of the ranks that share a run has
    one; `run` writes on rank 0 alone.

    Attributes:
        step: steps done.
        log: what the run writes.
        best: the evaluations on dev, and the best of them.
        untrained: split -> values of its evaluation before the first step, [rows, values]; empty if they are not known.
        last_dev: step and values of the last evaluation on dev, of a run without a test split: nothing has picked it.
        divergence: whether the run has diverged.
        stop_reason: what ended the run before its last step, see `find_stop_reason`.
        forgetting: compares the weights of each evaluation on dev with those of the start; None: they are not.
        summary: the content of summary.json; empty until the run has finished, and on a rank other than 0.
    """

    def __init__(
        self,
        config: Config,
        run: Run,
        ranks: Ranks = ALONE,
        *,
        has_test: bool = True,
    ) -> None:
        self.config, self.run, self.ranks, self._has_test = config, run, ranks, has_test
        self._replayable = config.optimizer.replayable
        self.step = self._first_step = 0  # the first of this process
        self.log, self.best, self.divergence = RunLog(config, run), BestStep(config), Divergence()
        self.untrained: dict[str, Tensor] = {}
        self.last_dev: tuple[int, Tensor] | None = None
        self._latest: tuple[int, Evaluation] | None = None  # step and evaluation on dev, of this process
        self._warned = self._kernels_recorded = False
        self._first_stepped: float | None = None  # when the first step of this process ended, for max_seconds
        self.stop_reason: str | None = None
        self.forgetting: Forgetting | None = None
        self.summary: dict[str, Any] = {}
        self._exchanged_before = ranks.exchanged["step"]

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.log.close(self.step, self.summary, error)

    # --- start ---

    def start(self, session: Session) -> None:
        """Begin a new run: save the initial weights that the base model does not have, and begin the trajectory."""
        loaded = session.loaded
        self.run.save_initial_state(
            lambda path: models.save_initial_state(loaded.model, loaded.fresh, path, loaded.fresh_rows)
        )
        fingerprint = models.fingerprint(loaded.model)
        self.run.update(weights_fingerprint=fingerprint)
        header = None
        if session.optimizer.replayable:
            session.optimizer.keep_start(lambda: session.params)
            header = _make_header(session, fingerprint)
        self.log.begin(header)

    def resume(self, step: int) -> None:
        """Continue an interrupted run at `step`. What it wrote after that step is dropped, to be written again."""
        self.step = self._first_step = step
        if step and self.run.writes:
            self.untrained = _read_values(self.run, UNTRAINED)[1]
            at, values = _read_values(self.run, LAST_DEV)
            self.last_dev = (at, values["dev"]) if values else None
        logged = self._logged_steps()
        self.run.truncate_metrics(step)
        self.ranks.from_first("truncated")
        lines = self.run.metrics()
        self.best.add(dev_evaluations(self.config, self.run, lines, stop=step))
        for line in lines:
            if line["kind"] == "train":
                self.divergence.add(line["loss"])
                self._warned = self._warned or self.divergence.reason is not None
        log.info("resumed at step %d of %d", step, self.config.steps)
        seconds = max((float(line["seconds"]) for line in lines), default=0.0)
        self.log.resume(step, seconds, logged, replayable=self._replayable)

    def _logged_steps(self) -> dict[str, int]:
        """Return `train` and `dev` -> the step of the last line of that kind: the loggers had the scalars up to it."""
        steps: dict[str, int] = {}
        for line in self.run.lines.read_valid()[0]:
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
            values = {**result.scalars(), **more}
            self.log.train(step, values)
            self.divergence.add(values["loss"])
        self.log.record(self.step, result)
        self.step = step
        if self._first_stepped is None:
            self._first_stepped = time.perf_counter()

    def record_kernels(self, noise: Noise) -> None:
        """Write to run.json, once, how the kernels of the noise run: that is known after a step."""
        if not self._kernels_recorded and self._replayable:
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
        """Return what ends the run before its last step: `divergence`, `patience`, `max_seconds`, or None.

        Every process takes one step at least, however low max_seconds is.
        """
        config = self.config
        if self.step >= config.steps:
            return None
        if config.stop_on_divergence is not False and self.divergence.reason is not None:
            return "divergence"
        if self.best.is_out_of_patience:
            return "patience"
        if config.max_seconds is None or self._first_stepped is None:
            return None
        is_over = time.perf_counter() - self._first_stepped >= config.max_seconds
        return "max_seconds" if self.ranks.first_says(is_over) else None

    def stop(self, session: Session, reason: str, rows: list[Any], progress: ProgressReporter) -> None:
        """End the run before its last step: evaluate on dev if it finishes now, save the weights, record the reason.

        Raises:
            RunStopped: for max_seconds with at_limit=stop; the run is not finished.
        """
        finishes = reason != "max_seconds" or self.config.at_limit == "finish"
        if finishes:
            self.evaluate_and_save(session, rows, progress, is_last=True)
        self.log.checkpoint(session, "last", self.step)
        self.run.update(stopped={"by": reason, "step": self.step})
        how = {
            "divergence": "because it diverged",
            "patience": f"by patience={self.config.patience}",
            "max_seconds": f"after max_seconds={self.config.max_seconds:g}" if self.config.max_seconds else "",
        }
        text = f"stopped {how[reason]} at step {self.step} of {self.config.steps}"
        if not finishes:
            raise RunStopped(text)
        self.stop_reason = reason
        log.info("%s: the best dev score is that of step %d", text, self.best.step)

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
        if (is_last or config.evaluates_at(step)) and step not in self.best.evaluations:
            agreement.repair_weights(session, self.run, step, self.ranks)
            evaluation = self._evaluate_or_fail(session, rows, progress.evaluation(len(rows)))
            if self.forgetting is not None:
                evaluation = evaluation.with_details(self.forgetting.measure(session))
            self._latest = step, evaluation
            self.best.add({step: evaluation.line()})
            is_best = self.best.step == step
            # A method without a trajectory resumes from `last` alone, so `best` must never be ahead of it.
            keep_up = is_best and not self._replayable
            self.log.sync()
            if config.checkpoint_every == 0 or save_due or step == config.steps or keep_up:
                self.log.checkpoint(session, "last", step)
            if is_best:
                self.log.checkpoint(session, "best", step)
            if not self._has_test:
                self.last_dev = step, evaluation.values
                self.run.write_values(LAST_DEV, _as_json({"dev": evaluation.values}, step))
            kept = [record for record in evaluation.records[: session.objective.kept_records] if record]
            if kept:
                self.run.log_completions(step, kept)
            self.log.evaluation("dev", step, evaluation)
            score = evaluation.scores()[config.chosen_metric]
            progress.report_dev(step, format_score(config.chosen_metric, score), evaluation.text)
            for record in kept[:1]:
                log.info("dev    %s", describe_completion(record))
        elif save_due:
            self.log.sync()
            self.log.checkpoint(session, "last", step)
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
        self.run.write_values(UNTRAINED, _as_json(self.untrained, 0))
        known = not self.run.writes or any(line.get("split") == TEST_BEFORE for line in self.run.metrics())
        if "test" in evaluations and not known:
            self.log.evaluation(TEST_BEFORE, 0, evaluations["test"])
            self.run.lines.sync()

    def evaluate_best(self, session: Session, name: str, rows: list[Any], console: Console) -> Evaluation:
        """Evaluate a session at the best step on a split; on dev, what this process has evaluated there is taken."""
        if name == "dev" and self._latest is not None and self._latest[0] == self.best.step:
            return self._latest[1]
        with progress_bar(console, f"{name} rows", len(rows)) as report:
            return self._evaluate_or_fail(session, rows, report)

    def _evaluate_or_fail(self, session: Session, rows: list[Any], report: Callable[[int], None]) -> Evaluation:
        evaluation = session.objective.evaluate(rows, report, session.ranks)
        if not evaluation.is_finite and self.step == 0:
            raise not_finite_at_start(self.config)
        metric, names = self.config.chosen_metric, evaluation.scores()
        if metric not in names:  # known only now where a reward names its parts
            raise UserError(f"metric={metric}: not one of {join(names)}{did_you_mean(metric, names)}")
        if not evaluation.is_finite:
            self.run.update(verdict=DIVERGED)
            raise RunFailed(
                f"step {self.step}: the loss of the evaluation is not finite: the weights have diverged; try a lower "
                f"optimizer.lr (now {self.config.optimizer.lr:g})"
            )
        return evaluation

    def exchanged_bytes_per_step(self) -> float:
        """Return how many bytes all ranks together have exchanged per step of this process; 0 in a process alone."""
        exchanged = self.ranks.exchanged["step"] - self._exchanged_before
        return round(exchanged / max(self.step - self._first_step, 1), 3)


def _as_json(values: Mapping[str, Tensor], step: int) -> dict[str, Any]:
    """Return the values of an evaluation's splits for a file; of their dtype, so that they come back as they were."""
    dtype = str(next(iter(values.values())).dtype).removeprefix("torch.")
    return {"step": step, "dtype": dtype, "rows": {name: rows.tolist() for name, rows in values.items()}}


def _read_values(run: Run, name: str) -> tuple[int, dict[str, Tensor]]:
    """Return the step and the values that `_as_json` has made a file of; none where there is no file."""
    stored = run.read_values(name) or {"step": 0, "dtype": "float32", "rows": {}}
    dtype = getattr(torch, stored["dtype"])
    return stored["step"], {split: torch.tensor(rows, dtype=dtype) for split, rows in stored["rows"].items()}


def _make_header(session: Session, fingerprint: str) -> trajectory.Header:
    """Return the header of the trajectory that starts from the session's weights."""
    config, optimizer, params = session.config, session.optimizer, session.params
    drawn = zeroth_order(config.optimizer)
    names = [name for name in type(config.optimizer).model_fields if name not in ("name", *CLIP_SETTINGS)]
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
