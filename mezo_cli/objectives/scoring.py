"""Scores: the losses and metrics of label scores, the evaluation of a split, its 95% intervals and comparisons.

A loss or a metric is a function of label scores, [rows, labels], and right labels, [rows], or of the number of rows per
label and prediction. Losses are computed and summed in float64: MeZO takes the difference of two losses that nearly
agree.

95% intervals: Wilson's of an accuracy, Newcombe's of the difference of two on the same rows, else the bootstrap. A row
is the unit: what is predicted for one says nothing about another. The intervals tell how far a result may be from that
on all rows of the same kind; they say nothing about another seed of the training (docs/reference/compare.md).

Torch and scipy are imported as they are used: settings and tables read this module without them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Counts = np.ndarray  # rows per label and prediction, float [samples, labels, labels]
Score = Callable[[np.ndarray], np.ndarray]  # row numbers, [samples, rows] -> the score of each sample, [samples]

RESAMPLES = 2000
SEED = 20240817  # any number: the same rows give the same interval
CHUNK = 2**20  # row numbers that are drawn at once
L2 = 1e-3  # of the fitted bias, beside the mean log-likelihood of a row


# --- losses ---


@dataclass(frozen=True)
class Loss:
    """A loss, given by one of two functions. A plain function is a differentiable loss of rows.

    Attributes:
        of_rows: returns the loss of each row, [rows], from label scores, [rows, labels], and right labels, [rows].
        of_counts: returns the loss, [samples], from the number of rows per label and prediction, [samples, labels,
            labels]: an array, and in a step on a GPU a tensor. So it uses the methods that both have.
        differentiable: whether it has a gradient; optimizers that take one refuse a loss that has none.
    """

    of_rows: "Callable[[Tensor, Tensor], Tensor] | None" = None
    of_counts: Callable[[Counts], np.ndarray] | None = None
    differentiable: bool = True

    def __call__(self, scores: "Tensor", labels: "Tensor") -> "Tensor":
        """Return the loss of label scores, [rows, labels], and right labels, [rows]: a scalar."""
        if self.of_rows is not None:
            return mean_over_rows(self.of_rows(scores, labels))
        return self.from_counts(count_predictions(scores, labels).unsqueeze(0))[0]

    def from_counts(self, counts: "Tensor") -> "Tensor":
        """Return the loss of rows per label and prediction: [members, labels, labels] -> [members], where they are."""
        import torch

        of_counts: Any = self.of_counts
        if counts.device.type != "cpu":  # the host would wait for a copy
            return of_counts(counts)
        return torch.from_numpy(of_counts(counts.numpy()))  # numpy adds in another order than torch: other bits

    def samples(self, scores: "Tensor", labels: "Tensor") -> Score:
        """Return the function that gives the loss of samples of the rows."""
        if self.of_rows is not None:
            return mean_of(self.of_rows(scores, labels).double().numpy())
        return Metric(self.of_counts).samples(scores.numpy(), labels.numpy())


def mean_over_rows(losses: "Tensor") -> "Tensor":
    """Return the mean of the losses of rows, [rows] -> [], added in the order in which `F.cross_entropy` adds them."""
    import torch.nn.functional as F

    return F.nll_loss(-losses.unsqueeze(1), losses.new_zeros(len(losses)).long())


def count_predictions(scores: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the number of rows per label and prediction, float64 [labels, labels]; nan if a score is not finite."""
    import torch

    one_hot, count = torch.nn.functional.one_hot, scores.shape[-1]
    predicted = in_float64(one_hot(scores.argmax(dim=-1), count))
    counts = in_float64(one_hot(labels, count)).mT @ predicted
    return torch.where(scores.isfinite().all(), counts, float("nan"))


def in_float64(values: "Tensor") -> "Tensor":
    """Return values in float64; in float32 on MPS, which has no float64."""
    return values.float() if values.device.type == "mps" else values.double()


def cross_entropy_of_rows(scores: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the negative log-likelihood of the right label among the labels, of each row."""
    import torch.nn.functional as F

    return F.cross_entropy(in_float64(scores), labels, reduction="none")


# --- metrics ---


@dataclass(frozen=True)
class Metric:
    """A metric, of which the highest value is the best (1 - e for an error e), given by one of two functions.

    Attributes:
        of_counts: returns the metric, [samples], from the number of rows per label and prediction, float
            [samples, labels, labels].
        of_scores: returns the metric from label scores, [rows, labels], and right labels, int64 [rows].
        hub_name: the hub's name for it, for model cards; empty: the same as here.
    """

    of_counts: Callable[[Counts], np.ndarray] | None = None
    of_scores: Callable[[np.ndarray, np.ndarray], float] | None = None
    hub_name: str = ""

    def __call__(self, scores: np.ndarray, labels: np.ndarray) -> float:
        """Return the metric of label scores, [rows, labels], and right labels, int64 [rows]."""
        return float(self.samples(scores, labels)(np.arange(len(labels))[None])[0])

    def samples(self, scores: np.ndarray, labels: np.ndarray) -> Score:
        """Return the function that gives the metric of samples of the rows."""
        count = scores.shape[1]
        cells = labels * count + scores.argmax(axis=-1)

        def of_samples(drawn: np.ndarray) -> np.ndarray:
            if self.of_scores is not None:
                return np.array([self.of_scores(scores[rows], labels[rows]) for rows in drawn])
            assert self.of_counts is not None
            offsets = count**2 * np.arange(len(drawn))[:, None]
            counts = np.bincount((cells[drawn] + offsets).ravel(), minlength=len(drawn) * count**2)
            return self.of_counts(counts.reshape(-1, count, count).astype(float))

        return of_samples


def _accuracy(counts: Counts) -> np.ndarray:
    return counts.diagonal(0, 1, 2).sum(1) / counts.sum((1, 2))


def _f1(counts: Counts) -> np.ndarray:
    """Return F1 of label 1 with two labels (MRPC, QQP), the mean over all labels with more; 0/0 counts as 0."""
    of_each = 2 * counts.diagonal(0, 1, 2) / (counts.sum(1) + counts.sum(2)).clip(1)
    return of_each[:, 1] if counts.shape[1] == 2 else of_each.mean(1)


def _matthews(counts: Counts) -> np.ndarray:
    """Return the Matthews correlation of label and prediction (CoLA), 0 where one of them is constant."""
    labels, predicted, rows = counts.sum(axis=2), counts.sum(axis=1), counts.sum(axis=(1, 2))
    agreement = np.trace(counts, axis1=1, axis2=2) * rows - (labels * predicted).sum(axis=1)
    spread = (rows**2 - (labels**2).sum(axis=1)) * (rows**2 - (predicted**2).sum(axis=1))
    return np.asarray(np.where(spread > 0, agreement / np.sqrt(np.maximum(spread, 1)), 0.0))


cross_entropy = Loss(cross_entropy_of_rows)
# 1 - a metric is piecewise constant, without a gradient (paper, section 3.3).
accuracy_loss = Loss(of_counts=lambda counts: 1.0 - _accuracy(counts), differentiable=False)
f1_loss = Loss(of_counts=lambda counts: 1.0 - _f1(counts), differentiable=False)
accuracy, f1 = Metric(_accuracy), Metric(_f1)
matthews = Metric(_matthews, hub_name="matthews_correlation")


# --- evaluations ---


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        loss: the objective's loss over all rows; nan when an output of the model is not finite.
        metrics: name -> value, without the loss; the first is the one that a log line leads with.
        values: what the evaluation follows from (`Objective.assess`), [rows, values].
        records: one per row; empty where they were not kept.
        details: further fields of its line in metrics.jsonl.
        samples: name -> what the interval of a score follows from, for those that have one: whether each row is right,
            bool [rows], if it is their fraction, else a function that gives the score of samples of the rows.
        text: one line for the log.
    """

    loss: float
    metrics: Mapping[str, float]
    values: "Tensor" = field(repr=False, compare=False)
    records: Sequence[Mapping[str, Any]] = field(default=(), repr=False, compare=False)
    details: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, np.ndarray | Score] = field(default_factory=dict, repr=False, compare=False)
    text: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite; it is not for diverged weights."""
        return math.isfinite(self.loss)

    def scores(self) -> dict[str, float]:
        """Return the metrics and the loss by name."""
        return {**self.metrics, "loss": self.loss}

    def with_details(self, figures: Mapping[str, float]) -> "Evaluation":
        """Return it with further fields in its line and its text."""
        shown = "".join(f"  {name} {value:.4g}" for name, value in figures.items())
        return replace(self, details={**self.details, **figures}, text=self.text + shown)

    def line(self) -> dict[str, Any]:
        """Return the fields of its line in metrics.jsonl."""
        return {"loss": self.loss, **self.metrics, **self.details}

    def summary(self, before: "Evaluation | None" = None) -> dict[str, Any]:
        """Return its scores with their `intervals`, or its differences to the scores of `before` on the same rows.

        Scores that have no interval are left out. A single row has none.
        """
        other, rows = {} if before is None else before.samples, len(self.values)
        names = [name for name in self.scores() if name in (self if before is None else before).samples]
        values = {name: self.scores()[name] - (0.0 if before is None else before.scores()[name]) for name in names}
        found = {name: interval(rows, self.samples[name], other.get(name)) for name in names if rows > 1}
        return {**values, "intervals": found}


def mean_of(sums: np.ndarray, numbers: np.ndarray | None = None) -> Score:
    """Return the function that gives the mean over samples of the rows of a value of each, or of sums / numbers."""

    def score(drawn: np.ndarray) -> np.ndarray:
        of = sums[drawn]
        return np.asarray(of.mean(axis=1) if numbers is None else of.sum(axis=1) / numbers[drawn].sum(axis=1))

    return score


# --- intervals ---


def interval(rows: int, score: np.ndarray | Score, before: np.ndarray | Score | None = None) -> list[float]:
    """Return the 95% interval of a score, or of its difference to another on the same rows (`Evaluation.samples`)."""
    if isinstance(score, np.ndarray):
        assert before is None or isinstance(before, np.ndarray)
        return list(wilson(int(score.sum()), rows) if before is None else paired_difference(before, score))

    from scipy import stats

    def statistic(drawn: np.ndarray, axis: int) -> np.ndarray:
        return score(drawn) if before is None else score(drawn) - before(drawn)  # type: ignore[operator]

    drawn: dict[str, Any] = {"n_resamples": RESAMPLES, "batch": max(1, CHUNK // rows), "rng": SEED, "vectorized": True}
    found = stats.bootstrap((np.arange(rows),), statistic, method="percentile", **drawn)
    return [float(bound) for bound in found.confidence_interval]


def wilson(right: int, rows: int) -> tuple[float, float]:
    """Return the score interval of a fraction (Wilson 1927; Newcombe 1998, Statistics in Medicine 17:857, method 3)."""
    from scipy import stats

    low, high = stats.binomtest(right, rows).proportion_ci(method="wilson")
    return float(low), float(high)


def paired_difference(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Return the interval of the accuracy after minus that before: whether each row was right, bool [rows].

    Wilson's intervals of the two, squared and added with their correlation (Newcombe 1998, Statistics in Medicine
    17:2635, method 10).
    """
    rows, first, second = len(before), float(after.mean()), float(before.mean())
    low1, high1 = wilson(int(after.sum()), rows)
    low2, high2 = wilson(int(before.sum()), rows)
    both, neither = int((before & after).sum()), int((~before & ~after).sum())
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    spread = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    excess = both * neither - gained * lost
    corrected = max(excess - rows / 2, 0.0) if excess > 0 else float(excess)  # continuity, as in the paper
    phi = corrected / math.sqrt(spread) if spread else 0.0
    below, above = (first - low1, high2 - second), (high1 - first, second - low2)
    down, up = (math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b)) for a, b in (below, above))
    return first - second - down, first - second + up


# --- baselines without training ---


def remove_bias(scores: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return name -> bias, [labels], to be added to the scores of every row.

    An untrained model often favours one label, and then the first thing that training does is to remove this bias. A
    number added to the scores of each label does the same without training. What a result has beyond that is learned.

    For two labels: `label_shares`, at which as many of the rows are predicted as each label as have it (the median of
    the scores where the labels are equally frequent), and `best_threshold`, which has the most of these rows right. For
    more labels: `fitted_bias`, by maximum likelihood.

    Scores are those of rows of train by the untrained model, [rows, labels], and labels [rows].
    """
    if scores.shape[1] != 2:
        return {"fitted_bias": fit_bias(scores, labels)}
    margins = (scores[:, 1] - scores[:, 0]).astype(float)
    shares, best = float(np.quantile(margins, np.mean(labels == 0))), best_threshold(margins, labels)
    return {"label_shares": np.array([shares, 0.0]), "best_threshold": np.array([best, 0.0])}


def best_threshold(margins: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold above which label 1 is predicted with the highest accuracy.

    It is midway between two neighbouring margins, 1 beyond the outermost one; of equally good ones the lowest. A
    margin, [rows], is the score of label 1 minus that of label 0.
    """
    distinct = np.unique(margins)
    thresholds = np.array([distinct[0] - 1.0, *(distinct[:-1] + distinct[1:]) / 2, distinct[-1] + 1.0])
    zeros, ones = (np.sort(margins[labels == label]) for label in (0, 1))
    right = np.searchsorted(zeros, thresholds, "right") + len(ones) - np.searchsorted(ones, thresholds, "right")
    return float(thresholds[right.argmax()])


def fit_bias(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the bias b, [labels], that maximises the mean log-likelihood of softmax(scores + b), with L2 on b.

    Scores are [rows, labels], labels [rows].
    """
    from scipy.optimize import minimize
    from scipy.special import logsumexp, softmax

    scores, fractions = scores.astype(float), np.bincount(labels, minlength=scores.shape[1]) / len(labels)

    def loss(bias: np.ndarray) -> tuple[float, np.ndarray]:
        value = logsumexp(scores + bias, axis=1).mean() - fractions @ bias  # the scores of right labels are constant
        gradient = softmax(scores + bias, axis=1).mean(axis=0) - fractions
        return float(value + L2 * bias @ bias), gradient + 2 * L2 * bias

    return np.asarray(minimize(loss, np.zeros(scores.shape[1]), jac=True, method="L-BFGS-B").x)
