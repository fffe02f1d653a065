"""How well scores separate labels: the area under the ROC curve (AUC), its standard error by chance, better words."""

from collections.abc import Sequence

import numpy as np

PASSES = 2  # over the labels, when words are chosen one at a time
OWN = 0.1  # of the AUC above 0.5, of a word's score alone: it must be more probable in the rows of its label


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the probability that a positive row scores above a negative one; ties count half.

    Args:
        scores: [rows].
        positive: bool [rows]; some are true and some are not.
    """
    in_order = np.sort(scores)
    ranks = (np.searchsorted(in_order, scores, "left") + np.searchsorted(in_order, scores, "right") + 1) / 2
    n = int(positive.sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))


def separation(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUC of the difference of scores for two labels; for more, the mean AUC of each label's log-share.

    Labels without a row, or with all rows, are left out.

    Args:
        scores: [rows, labels].
        labels: [rows].
    """
    if scores.shape[1] == 2:
        return auc(scores[:, 1] - scores[:, 0], labels == 1)
    top = scores.max(axis=1, keepdims=True)
    shares = scores - top - np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
    return float(np.mean([auc(shares[:, label], labels == label) for label in _seen(labels)]))


def chance_error(labels: np.ndarray) -> float:
    """Return the standard error of the AUC of scores that say nothing (Mann-Whitney), averaged over the labels."""
    counts = [(int((labels == label).sum()), int((labels != label).sum())) for label in _seen(labels)]
    return float(np.mean([np.sqrt((a + b + 1) / (12 * a * b)) for a, b in counts]))


def choose_words(current: np.ndarray, candidates: np.ndarray, labels: np.ndarray) -> tuple[list[int], float]:
    """Choose a word per label that separates the rows better, one label at a time.

    Args:
        current: log-probabilities of the label words, [rows, labels].
        candidates: log-probabilities of other words, [rows, words].
        labels: [rows].

    Returns:
        The number of the candidate per label, -1 where the label word stays, and the separation that is reached.
    """
    chosen, scores = [-1] * current.shape[1], current.copy()
    needed = 0.5 + max(OWN, 2 * chance_error(labels))
    best = separation(scores, labels)
    for _ in range(PASSES):
        for label in range(len(chosen)):
            for word in range(candidates.shape[1]):
                if word in chosen or auc(candidates[:, word], labels == label) < needed:
                    continue
                before = scores[:, label].copy()
                scores[:, label] = candidates[:, word]
                reached = separation(scores, labels)
                if reached > best:
                    chosen[label], best = word, reached
                else:
                    scores[:, label] = before
    return chosen, best


def _seen(labels: np.ndarray) -> Sequence[int]:
    """Return the labels that have rows, where other rows have another one."""
    found = np.unique(labels)
    return [] if len(found) < 2 else [int(label) for label in found]
