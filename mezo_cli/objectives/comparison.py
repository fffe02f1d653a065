"""Compare the trained model with the untrained one on the same rows: intervals and paired differences.

What `summary.json` says about a result besides the result (docs/reference/compare.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mezo_cli.objectives.intervals import Interval, paired_difference, percentile, resample, wilson

if TYPE_CHECKING:
    from mezo_cli.objectives.base import Objective
    from mezo_cli.objectives.evaluation import Evaluation


@dataclass(frozen=True)
class Judged:
    """The scores of some rows, with what their intervals follow from.

    Attributes:
        values: name -> score: the metrics, and the loss if it is worth comparing.
        right: name -> whether each row is right, bool [rows].
        drawn: name -> score of each bootstrap sample of the rows, of all scores but those in `right`.
    """

    values: Mapping[str, float]
    right: Mapping[str, np.ndarray]
    drawn: Mapping[str, np.ndarray]

    def intervals(self) -> dict[str, list[float]]:
        """Return name -> 95% interval."""
        rows = {name: wilson(int(right.sum()), len(right)) for name, right in self.right.items()}
        return _as_lists(rows | {name: percentile(drawn) for name, drawn in self.drawn.items()})

    def summary(self) -> dict[str, Any]:
        """Return the scores, with `intervals`."""
        return {**self.values, "intervals": self.intervals()}

    def minus(self, other: "Judged") -> dict[str, Any]:
        """Return the differences to other scores of the same rows, with `intervals`."""
        intervals = {name: paired_difference(right, self.right[name]) for name, right in other.right.items()}
        intervals |= {name: percentile(self.drawn[name] - drawn) for name, drawn in other.drawn.items()}
        values = {name: self.values[name] - value for name, value in other.values.items()}
        return {**values, "intervals": _as_lists(intervals)}


def _as_lists(intervals: Mapping[str, Interval]) -> dict[str, list[float]]:
    """Return intervals as JSON gives them back."""
    return {name: list(interval) for name, interval in intervals.items()}


def judge(evaluation: "Evaluation") -> Judged:
    """Return the scores of an evaluation that have an interval, and what it follows from."""
    kept = {*evaluation.right, *evaluation.samples}
    values = {name: value for name, value in evaluation.scores().items() if name in kept}
    return Judged(values, evaluation.right, resample(evaluation.samples, len(evaluation.values)))


def compare(
    objective: "Objective",
    before: Mapping[str, "Evaluation"],
    after: Mapping[str, "Evaluation"],
    rows: Mapping[str, Any],
    *,
    trained: bool,
) -> dict[str, Any]:
    """Return `intervals` (of dev and test), `difference`, `test_before` and `baselines`, for summary.json.

    Args:
        objective: of the run.
        before: split -> evaluation by the untrained model; empty if it is not known.
        after: split -> evaluation at the best step: `train`, `dev`, and `test` if there is one.
        rows: split -> its rows.
        trained: whether the run took a step. One that did not has no difference: its result is that of the untrained
            model, and gives the baselines.
    """
    judged = {name: judge(evaluation) for name, evaluation in after.items() if name != "train"}
    summary: dict[str, Any] = {"intervals": {name: scores.intervals() for name, scores in judged.items()}}
    if not before:
        return summary
    if trained:
        untrained = {name: judge(before[name]) for name in judged}
        summary["difference"] = {name: judged[name].minus(scores) for name, scores in untrained.items()}
        if "test" in untrained:
            summary["test_before"] = untrained["test"].summary()
    return summary | objective.compare_with_untrained(before, judged if trained else {}, rows)
