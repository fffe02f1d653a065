"""What the scores of an untrained model give when the bias between its labels is removed: nothing else is learned.

An untrained model often favours one label, and then the first thing that training does is to remove this bias. A number
added to the scores of each label does the same without training. What a result has beyond these baselines is learned.
"""

from collections.abc import Mapping

import numpy as np

L2 = 1e-3  # of the fitted bias, beside the mean log-likelihood of a row


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

    It is midway between two neighbouring margins, 1 beyond the outermost one; of equally good ones the lowest.

    Args:
        margins: the score of label 1 minus that of label 0, [rows].
        labels: [rows].
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

    Args:
        scores: [rows, labels].
        labels: [rows].
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
