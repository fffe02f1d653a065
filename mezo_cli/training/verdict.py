"""Judge from a run's recorded values which evaluation is the best, and whether training has helped, or diverged.

Only lines of metrics.jsonl count, so a resumed run is judged at the same steps as one that was never stopped. Which
training losses there are depends on `log_every`.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError
from mezo_cli.runs import Run

WINDOW = 10  # losses at each end of the run that are compared
FACTOR, FLOOR = 3.0, 0.1  # the mean may rise by FACTOR * max(|mean|, std, FLOOR) of the first losses
EARLY_FLOOR = 1.0  # in place of FLOOR while the windows are smaller: the loss of a few batches says little

Evaluations = Mapping[int, Mapping[str, Any]]  # step -> the fields of the evaluation's line in metrics.jsonl

TIE = 1e-7  # of equal scores the one with the lower loss is better by less than two of these
IMPROVED, NOT_IMPROVED, DIVERGED = "improved", "not_improved", "diverged"


class Divergence:
    """Whether a run has diverged, as far as its lines of metrics.jsonl say. A line takes constant time.

    It has while one of these holds of the newest line of its kind (a loss that is not finite is never recorded):

    - The mean of the last 10 training losses is above that of the first 10 by more than 3 max(|mean|, std, 0.1), mean
      and population std of the first 10. Of n < 20 losses it is the last and the first w = n // 2, and they must differ
      by more than 30 / w max(|mean|, std, 1): few losses that differ much are usual with small batches. Once it has
      diverged, w and that limit stay until the last losses are below it: the first ones may soon be diverged, too.
    - Every dev prediction is one label, which was not so at the first evaluation (that of step 0), and the dev loss is
      above its loss.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._losses = 0
        self._width, self._before, self._limit = 0, 0.0, 0.0  # of the comparison that the last loss was judged by
        self._start: Mapping[str, Any] | None = None  # the first evaluation on dev
        self._by_losses: str | None = None
        self._by_dev: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the run has diverged, for the log; None if it has not."""
        return self._by_losses or self._by_dev

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the next line of metrics.jsonl."""
        if line["kind"] == "train":
            self._by_losses = self._judge_loss(line["loss"])
        elif line["split"] == "dev":
            self._by_dev = self._judge_dev(line)

    def _judge_loss(self, loss: float) -> str | None:
        self._losses += 1
        self._last.append(loss)
        if len(self._first) < WINDOW:
            self._first.append(loss)
        if self._by_losses is None:
            self._set_limit(min(WINDOW, self._losses // 2))
        width = self._width
        if not width:
            return None
        now = statistics.fmean(list(self._last)[-width:])
        if now <= self._limit:
            return None
        if width == 1:
            return f"the loss is {now:.4g}, and the first was {self._before:.4g}"
        return f"the mean of the last {width} losses is {now:.4g}, that of the first {width} {self._before:.4g}"

    def _set_limit(self, width: int) -> None:
        """Set how high the mean of the last `width` losses may be."""
        first = self._first[:width] or [0.0]
        floor = FLOOR if width == WINDOW else EARLY_FLOOR
        self._width, self._before = width, statistics.fmean(first)
        rise = max(abs(self._before), statistics.pstdev(first), floor)
        self._limit = self._before + FACTOR * WINDOW / max(width, 1) * rise

    def _judge_dev(self, line: Mapping[str, Any]) -> str | None:
        start = self._start = self._start or line
        label = _only_label(line)
        if label is None or _only_label(start) is not None or line["loss"] <= start["loss"]:
            return None
        return f"every dev prediction is {label}, and the dev loss {line['loss']:.4g}, at step 0 {start['loss']:.4g}"


def _only_label(line: Mapping[str, Any]) -> str | None:
    """Return the label that an evaluation predicts for every row; None if there are several."""
    labels = [label for label, count in line.get("predicted", {}).items() if count]
    return labels[0] if len(labels) == 1 else None


def verdict(diverged: bool, best_step: int, steps: int) -> str | None:
    """Return improved, not_improved (step 0 was picked) or diverged (by its last lines); None for a run of no steps."""
    if not steps:
        return None
    if diverged:
        return DIVERGED
    return IMPROVED if best_step else NOT_IMPROVED


# --- the best evaluation ---


def dev_evaluations(
    config: Config, run: Run, lines: Sequence[Mapping[str, Any]], stop: int
) -> dict[int, Mapping[str, Any]]:
    """Return step -> line of every evaluation on dev among the lines of metrics.jsonl."""
    evaluations = {line["step"]: line for line in lines if line["kind"] == "eval" and line["split"] == "dev"}
    for step in range(stop):
        if config.evaluates_at(step) and step not in evaluations:
            raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: it lacks the evaluation of step {step}")
    return evaluations


def best_step(config: Config, evaluations: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the step with the best value of the chosen metric; of equal ones the lower loss, then the earlier step."""
    return min(evaluations, key=lambda step: (*config.rank(evaluations[step]), step))


# --- the trials of a search: for `mezo tune`, and for its page ---


def trained_evaluations(run: Run, steps: int) -> Evaluations:
    """Return step -> the evaluation on dev of weights that the trial has trained: those after step 0.

    Args:
        run: the trial's run.
        steps: of its config; 0 for a linear probe alone, which is trained at step 0.
    """
    return {line["step"]: line for line in run.evaluations("dev") if line["step"] or not steps}


def goal_metric(config: Config, goal: str) -> str:
    """Return the metric of which a search seeks the best value; `config.order_of` says whether that is the highest."""
    return "loss" if goal == "loss" else config.chosen_metric


def value_of(line: Mapping[str, Any], config: Config, goal: str) -> float:
    """Return the one number by which evaluations are ordered; the loss decides between equal scores.

    TIE is below the step of any score that is a fraction of fewer than 5 million rows: the loss decides only ties.
    """
    metric, loss = goal_metric(config, goal), float(line["loss"])
    tie = 0.0 if metric == "loss" else TIE * loss / (1 + abs(loss))
    return float(line[metric]) - config.order_of(metric) * tie


def best_evaluation(run: Run, config: Config, goal: str) -> Mapping[str, Any] | None:
    """Return the best evaluation of trained weights by the rule of `Config.rank`; None if there is none yet."""
    metric = goal_metric(config, goal)
    evaluations = trained_evaluations(run, config.steps).values()
    return min(evaluations, key=lambda line: config.rank(line, metric), default=None)


def end_of(run: Run) -> str:
    """Return `diverged`, `pruned`, or else the run's status: `finished`, `failed`, `interrupted`, `running`."""
    status = run.status()
    files = run.read_summary() if status == "finished" else run.info()
    if status in ("finished", "failed") and files.get("verdict") == DIVERGED:
        return DIVERGED
    return "pruned" if status == "finished" and files.get("stopped") == "pruned" else status
