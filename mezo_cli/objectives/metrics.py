"""The metrics of a task: from the labels' scores and the right labels to the number that picks the best checkpoint.

Nothing here imports torch: tables and pages compare the scores of runs, too.
"""

from typing import ClassVar

import numpy as np

from mezo_cli.config.registry import METRICS


class Metric:
    """A metric, of which the highest value is the best: return 1 - e for an error e.

    A subclass has its name in `METRICS`, or in the entry-point group `mezo.metrics`.

    Class attributes:
        hub_name: the hub's name for it, for model cards; empty: the same as here.
    """

    hub_name: ClassVar[str] = ""

    def compute(self, scores: np.ndarray, labels: np.ndarray) -> float:
        """Return the metric of label scores, [rows, labels], and right labels, int64 [rows]."""
        raise NotImplementedError

    def compute_samples(self, scores: np.ndarray, labels: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return the metric of each sample of the rows, for intervals: row numbers [samples, rows] -> [samples]."""
        return np.array([self.compute(scores[rows], labels[rows]) for rows in samples])


class CountMetric(Metric):
    """A metric that follows from the number of rows per label and prediction."""

    def compute_from_counts(self, counts: np.ndarray) -> np.ndarray:
        """Return the metric of each sample: rows per label and prediction [samples, labels, labels] -> [samples]."""
        raise NotImplementedError

    def compute(self, scores: np.ndarray, labels: np.ndarray) -> float:
        """Return the metric of label scores, [rows, labels], and right labels, int64 [rows]."""
        return float(self.compute_samples(scores, labels, np.arange(len(labels))[None])[0])

    def compute_samples(self, scores: np.ndarray, labels: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return the metric of each sample of the rows: row numbers [samples, rows] -> [samples]."""
        count = scores.shape[1]
        cells = labels * count + scores.argmax(axis=-1)
        offsets = count**2 * np.arange(len(samples))[:, None]
        counts = np.bincount((cells[samples] + offsets).ravel(), minlength=len(samples) * count**2)
        return self.compute_from_counts(counts.reshape(-1, count, count).astype(float))


class Accuracy(CountMetric):
    """The fraction of rows whose label is predicted."""

    def compute_from_counts(self, counts: np.ndarray) -> np.ndarray:
        """Return the accuracy."""
        return np.asarray(np.trace(counts, axis1=1, axis2=2) / counts.sum(axis=(1, 2)))


class F1(CountMetric):
    """F1 of label 1 with two labels (MRPC, QQP), the mean over all labels with more; 0/0 counts as 0."""

    def compute_from_counts(self, counts: np.ndarray) -> np.ndarray:
        """Return F1."""
        hits = np.diagonal(counts, axis1=1, axis2=2)
        of_each = 2 * hits / np.maximum(counts.sum(axis=1) + counts.sum(axis=2), 1)
        return np.asarray(of_each[:, 1] if counts.shape[1] == 2 else of_each.mean(axis=1))


class Matthews(CountMetric):
    """The Matthews correlation of label and prediction (CoLA), 0 where one of them is constant."""

    hub_name = "matthews_correlation"

    def compute_from_counts(self, counts: np.ndarray) -> np.ndarray:
        """Return the correlation."""
        labels, predicted, rows = counts.sum(axis=2), counts.sum(axis=1), counts.sum(axis=(1, 2))
        agreement = np.trace(counts, axis1=1, axis2=2) * rows - (labels * predicted).sum(axis=1)
        spread = (rows**2 - (labels**2).sum(axis=1)) * (rows**2 - (predicted**2).sum(axis=1))
        return np.asarray(np.where(spread > 0, agreement / np.sqrt(np.maximum(spread, 1)), 0.0))


def find_metric(name: str) -> Metric:
    """Return the metric that `task.metric` names."""
    metric: Metric = METRICS.load(name)()
    return metric
