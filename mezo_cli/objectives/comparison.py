"""Compare the trained model with the untrained one on the same rows: what `summary.json` says besides the result.

See docs/reference/compare.md. 95% intervals: Wilson's of an accuracy, Newcombe's of the difference of two on the same
rows, else the bootstrap. A row is the unit: what is predicted for one says nothing about another. The intervals tell
how far a result may be from that on all rows of the same kind; they say nothing about another seed of the training.

An untrained model often favours one label, and then the first thing that training does is to remove this bias. A number
added to the scores of each label does the same without training. What a result has beyond these baselines is learned.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mezo_cli.objectives.base import Objective
    from mezo_cli.objectives.evaluation import Evaluation

Interval = tuple[float, float]
Score = Callable[[np.ndarray], np.ndarray]  # row numbers, [resamples, rows] -> the score of each resample, [resamples]

Z = 1.959963984540054  # the 97.5% quantile of the normal distribution
RESAMPLES = 2000
SEED = 20240817  # any number: the same rows give the same interval
CHUNK = 2**20  # row numbers that are drawn at once
L2 = 1e-3  # of the fitted bias, beside the mean log-likelihood of a row


@dataclass(frozen=True)
class Judged:
    """The scores of some rows, with what their intervals follow from.

    Attributes:
        rows: their number.
        values: name -> score: the metrics, and the loss if it is worth comparing.
        right: name -> whether each row is right, bool [rows].
        drawn: name -> score of each bootstrap sample of the rows, of all scores but those in `right`.
    """

    rows: int
    values: Mapping[str, float]
    right: Mapping[str, np.ndarray]
    drawn: Mapping[str, np.ndarray]

    def intervals(self) -> dict[str, list[float]]:
        """Return name -> 95% interval; none of a single row."""
        if self.rows < 2:
            return {}
        rows = {name: wilson(int(right.sum()), len(right)) for name, right in self.right.items()}
        return _as_lists(rows | {name: percentile(drawn) for name, drawn in self.drawn.items()})

    def summary(self) -> dict[str, Any]:
        """Return the scores, with `intervals`."""
        return {**self.values, "intervals": self.intervals()}

    def minus(self, other: "Judged") -> dict[str, Any]:
        """Return the differences to other scores of the same rows, with `intervals`."""
        intervals: dict[str, Interval] = {}
        if self.rows > 1:
            intervals |= {name: paired_difference(right, self.right[name]) for name, right in other.right.items()}
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
    rows = len(evaluation.values)
    return Judged(rows, values, evaluation.right, resample(evaluation.samples, rows))


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


# --- intervals ---


def wilson(right: int, rows: int) -> Interval:
    """Return the score interval of a fraction (Wilson 1927; Newcombe 1998, Statistics in Medicine 17:857, method 3)."""
    fraction, scale = right / rows, 1 + Z * Z / rows
    middle = fraction + Z * Z / (2 * rows)
    half = Z * math.sqrt(fraction * (1 - fraction) / rows + (Z / (2 * rows)) ** 2)
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def paired_difference(before: np.ndarray, after: np.ndarray) -> Interval:
    """Return the interval of the accuracy after minus that before, on the same rows.

    Wilson's intervals of the two, squared and added with their correlation (Newcombe 1998, Statistics in Medicine
    17:2635, method 10).

    Args:
        before, after: whether each row was right, bool [rows].
    """
    rows, first, second = len(before), float(after.mean()), float(before.mean())
    low1, high1 = wilson(int(after.sum()), rows)
    low2, high2 = wilson(int(before.sum()), rows)
    both, neither = int((before & after).sum()), int((~before & ~after).sum())
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    spread = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    excess = both * neither - gained * lost
    excess_corrected = max(excess - rows / 2, 0.0) if excess > 0 else float(excess)  # continuity, as in the paper
    phi = excess_corrected / math.sqrt(spread) if spread else 0.0
    below, above = (first - low1, high2 - second), (high1 - first, second - low2)
    down, up = (math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b)) for a, b in (below, above))
    return first - second - down, first - second + up


def resample(scores: Mapping[str, Score], rows: int) -> dict[str, np.ndarray]:
    """Return the scores of `RESAMPLES` bootstrap samples of the rows, [RESAMPLES] each, all on the same samples."""
    generator, chunk = np.random.default_rng(SEED), max(1, min(RESAMPLES, CHUNK // rows))
    sampled: dict[str, list[np.ndarray]] = {name: [] for name in scores}
    for start in range(0, RESAMPLES, chunk):
        drawn = generator.integers(rows, size=(min(chunk, RESAMPLES - start), rows))
        for name, score in scores.items():
            sampled[name].append(score(drawn))
    return {name: np.concatenate(parts) for name, parts in sampled.items()}


def sample_mean(values: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the mean over each sample of the rows, given a value of each: row numbers [samples, rows] -> [samples]."""
    return np.asarray(values[samples].mean(axis=1))


def sample_ratio(sums: np.ndarray, numbers: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the ratio of two sums over each sample of the rows: row numbers [samples, rows] -> [samples]."""
    return np.asarray(sums[samples].sum(axis=1) / numbers[samples].sum(axis=1))


def percentile(resampled: np.ndarray) -> Interval:
    """Return the bootstrap's percentile interval (Efron and Tibshirani 1993, chapter 13)."""
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


# --- baselines without training ---


def remove_bias(scores: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return name -> bias, [labels], to be added to the scores of every row.

    For two labels: `label_shares`, at which as many of the rows are predicted as each label as have it (the median of
    the scores where the labels are equally frequent), and `best_threshold`, which has the most of these rows right. For
    more labels: `fitted_bias`, by maximum likelihood.

    Args:
        scores: of rows of train, by the untrained model, [rows, labels].
        labels: of these rows, [rows].
    """
    if scores.shape[1] != 2:
        return {"fitted_bias": fit_bias(scores, labels)}
    margins = (scores[:, 1] - scores[:, 0]).astype(float)
    thresholds: Mapping[str, float] = {
        "label_shares": float(np.quantile(margins, np.mean(labels == 0))),
        "best_threshold": best_threshold(margins, labels),
    }
    return {name: np.array([threshold, 0.0]) for name, threshold in thresholds.items()}


def best_threshold(margins: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold above which label 1 is predicted with the highest accuracy.

    It is midway between two neighbouring margins, 1 beyond the outermost one; of equally good ones the lowest. A
    margin, [rows], is the score of label 1 minus that of label 0.
    """
    order = np.argsort(margins, kind="stable")
    ordered, ones = margins[order], labels[order] == 1
    right = np.concatenate([[0], np.cumsum(~ones)]) + ones.sum() - np.concatenate([[0], np.cumsum(ones)])
    right[1:-1][ordered[1:] == ordered[:-1]] = -1  # equal margins cannot be parted
    at = int(right.argmax())
    if at in (0, len(ordered)):
        return float(ordered[0] - 1.0 if at == 0 else ordered[-1] + 1.0)
    return float((ordered[at - 1] + ordered[at]) / 2)


def fit_bias(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the bias b, [labels], that maximises the mean log-likelihood of softmax(scores + b), with L2 on b.

    Scores are [rows, labels], labels [rows].
    """
    from scipy.optimize import minimize

    scores, fractions = scores.astype(float), np.bincount(labels, minlength=scores.shape[1]) / len(labels)

    def objective(bias: np.ndarray) -> tuple[float, np.ndarray]:
        shifted = scores + bias
        top = shifted.max(axis=1, keepdims=True)
        powers = np.exp(shifted - top)
        total = powers.sum(axis=1, keepdims=True)
        loss = float(np.mean(top + np.log(total)) - fractions @ bias)  # the scores of the right labels are constant
        return loss + L2 * float(bias @ bias), (powers / total).mean(axis=0) - fractions + 2 * L2 * bias

    return np.asarray(minimize(objective, np.zeros(scores.shape[1]), jac=True, method="L-BFGS-B").x)
