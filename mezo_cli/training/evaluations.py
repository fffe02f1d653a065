"""The evaluations of a run: of dev when they are due, with the checkpoints that follow; of the untrained model."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from torch import Tensor

from mezo_cli.console import ProgressReporter, describe_completion, log, progress_bar
from mezo_cli.errors import RunFailed, UserError, did_you_mean, join
from mezo_cli.objectives.scoring import Evaluation
from mezo_cli.runs.contents import format_score
from mezo_cli.session.opening import check_same_weights
from mezo_cli.session.session import Session, not_finite_at_start
from mezo_cli.training.divergence import DIVERGED, lower_rate
from mezo_cli.training.forgetting import Forgetting
from mezo_cli.training.run_log import RunLog

TEST_BEFORE = "test_before"  # the split of the evaluation on test before training, in metrics.jsonl: it is no result
UNTRAINED, LAST_DEV = "untrained.json", "last_dev.json"


@dataclass
class Evaluations:
    """Evaluates a session on the rows of a run, and keeps what the result follows from.

    Attributes:
        run_log: of the run; its step is that of the session.
        rows: split -> the rows that are evaluated.
        console: where progress is shown.
        forgetting: measured at each evaluation on dev; None where it is not.
        dev: step -> the fields of the line of the evaluation on dev.
        best: the step of the best of them.
        dev_seconds: what those after the first step have taken in this process.
        untrained: split -> values of its evaluation before the first step, [rows, values]; empty if they are not known.
        last_dev: step and values of the last evaluation on dev, of a run without a test split: nothing has picked it.
    """

    run_log: RunLog
    rows: Mapping[str, list[Any]]
    console: Console
    forgetting: Forgetting | None
    dev: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    best: int = 0
    dev_seconds: float = 0.0
    untrained: dict[str, Tensor] = field(default_factory=dict)
    last_dev: tuple[int, Tensor] | None = None
    _was_told: bool = False  # that the loss on dev has risen
    _latest: tuple[int, Evaluation] | None = None  # step and evaluation on dev, of this process

    def load(self) -> None:
        """Read what a run that is resumed has kept to compare its result with."""
        self.untrained = self.run_log.load_values(UNTRAINED)[1]
        step, values = self.run_log.load_values(LAST_DEV)
        self.last_dev = (step, values["dev"]) if values else None

    def on_dev(self, session: Session, progress: ProgressReporter, *, is_last: bool = False) -> None:
        """Evaluate on dev and save checkpoints, if they are due at the current step, or the run ends with it.

        The steps before are on the disk before the checkpoints are, and these before the evaluation's line: where the
        line is, they are complete. The line is on the disk before the next step.
        """
        config, run_log, step = self.run_log.config, self.run_log, self.run_log.step
        save_due = config.checkpoint_every > 0 and step % config.checkpoint_every == 0
        evaluation = None
        if (is_last or config.evaluates_at(step)) and step not in self.dev:
            check_same_weights(session, step)
            began = time.perf_counter()
            evaluation = self._evaluate(session, self.rows["dev"], progress.evaluation(len(self.rows["dev"])))
            self.dev_seconds += time.perf_counter() - began if run_log.started is not None else 0.0
            if self.forgetting is not None:
                evaluation = evaluation.with_details(self.forgetting.measure(session))
            self._latest = step, evaluation
            self.dev[step] = evaluation.line()
            self.best = config.best_step(self.dev)
            if step and not self._was_told:
                self._warn_if_worse(evaluation)
        if evaluation is None and not save_due:
            return
        run_log.sync()
        is_best = evaluation is not None and self.best == step
        # A method without a trajectory resumes from `last` alone, so `best` must never be ahead of it.
        keep_up = is_best and not session.optimizer.replayable
        if save_due or config.checkpoint_every == 0 or step == config.steps or keep_up:
            run_log.checkpoint(session, "last")
        if is_best:
            run_log.checkpoint(session, "best")
        if evaluation is None:
            return
        if "test" not in self.rows:
            self.last_dev = step, evaluation.values
            run_log.save_values(LAST_DEV, {"dev": evaluation.values})
        count = session.objective.kept_records if config.data.store_texts else 0
        kept = [record for record in evaluation.records[:count] if record]
        if kept:
            run_log.run.log_completions(step, kept)
        run_log.evaluation("dev", step, evaluation)
        metric = config.chosen_metric
        progress.report_dev(step, format_score(metric, evaluation.scores()[metric], "%"), evaluation.text)
        for record in kept[:1]:
            log.info("dev    %s", describe_completion(record))

    def _warn_if_worse(self, evaluation: Evaluation) -> None:
        """Say once that the loss on dev is above that of the untrained model, beyond its interval."""
        run_log, before = self.run_log, self.dev.get(0, {}).get("loss", math.inf)
        if evaluation.loss > before and evaluation.summary()["intervals"].get("loss", (-math.inf,))[0] > before:
            self._was_told = True
            what = f"the loss on dev, {evaluation.loss:.4g}, is above that before training, {before:.4g}"
            advice = lower_rate(run_log.config, run_log.run)
            log.warning("warning: step %d: %s; %s", run_log.step, what, advice)

    def before_training(self, session: Session) -> None:
        """Before the first step, score the rows that the result will be compared on, and store the scores.

        So a resumed run has them too. A run without steps is its own comparison.
        """
        config, run = self.run_log.config, self.run_log.run
        if self.run_log.step or not config.steps or not config.test_at_start:
            return
        evaluations = {split: self.at_best(session, split) for split in self.rows}
        self.untrained = {name: evaluation.values for name, evaluation in evaluations.items()}
        self.run_log.save_values(UNTRAINED, self.untrained)
        is_logged = not run.writes or any(line.get("split") == TEST_BEFORE for line in run.metrics())
        if "test" in evaluations and not is_logged:
            self.run_log.evaluation(TEST_BEFORE, 0, evaluations["test"])
            run.lines.sync()

    def at_best(self, session: Session, split: str) -> Evaluation:
        """Evaluate a session at the best step on a split; on dev, what this process has evaluated there is taken."""
        if split == "dev" and self._latest is not None and self._latest[0] == self.best:
            return self._latest[1]
        with progress_bar(self.console, f"{split} rows", len(self.rows[split])) as report:
            return self._evaluate(session, self.rows[split], report)

    def _evaluate(self, session: Session, rows: list[Any], report: Callable[[int], None]) -> Evaluation:
        config, step = self.run_log.config, self.run_log.step
        evaluation = session.objective.evaluate(rows, report, session.ranks)
        if not evaluation.is_finite and step == 0:
            raise not_finite_at_start(config)
        metric, names = config.chosen_metric, evaluation.scores()
        if metric not in names:  # known only now where a reward names its parts
            raise UserError(f"metric={metric}: not one of {join(names)}{did_you_mean(metric, names)}")
        if not evaluation.is_finite:
            self.run_log.run.update(verdict=DIVERGED)
            why = f"the weights have diverged; {lower_rate(config, self.run_log.run)}{config.model.wider_range}"
            raise RunFailed(f"step {step}: the loss of the evaluation is not finite: {why}")
        return evaluation
