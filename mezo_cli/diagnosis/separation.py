"""How well scores separate labels: the area under the ROC curve (AUC), its standard error by chance, better words."""

import numpy as np

PASSES = 2  # over the labels, when words are chosen one at a time
OWN = 0.1  # of the AUC above 0.5, of a word's score alone: it must be more probable in the rows of its label


def separation(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUC of the difference of scores for two labels; for more, the mean AUC of each label's log-share.

    Labels without a row, or with all rows, are left out.

    Args:
        scores: [rows, labels].
        labels: [rows].
    """
    from scipy.special import log_softmax

    if scores.shape[1] == 2:
        return auc(scores[:, 1] - scores[:, 0], labels == 1)
    shares = log_softmax(scores, axis=1)
    return float(np.mean([auc(shares[:, label], labels == label) for label in np.unique(labels)]))


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the probability that a positive row scores above a negative one; ties count half. Both [rows]."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(positive, scores))


def chance_error(labels: np.ndarray) -> float:
    """Return the standard error of the AUC of scores that say nothing (Mann-Whitney), averaged over the labels."""
    counts = np.unique(labels, return_counts=True)[1]
    others = len(labels) - counts
    return float(np.sqrt((len(labels) + 1) / (12 * counts * others)).mean())


def choose_words(current: np.ndarray, candidates: np.ndarray, labels: np.ndarray) -> tuple[list[int], float]:
    """Choose a word per label that separates the rows better, one label at a time.

    Args:
        current: log-probabilities of the label words, [rows, labels].
        candidates: log-probabilities of other words, [rows, words].
        labels: [rows].

    Returns:
        The number of the candidate per label, -1 where the label word stays, and the separation that is reached.
    """
    chosen, scores, best = [-1] * current.shape[1], current.copy(), separation(current, labels)
    needed = 0.5 + max(OWN, 2 * chance_error(labels))
    for _ in range(PASSES):
        for label in set(labels.tolist()):
            for word in range(candidates.shape[1]):
                if word in chosen or auc(candidates[:, word], labels == label) < needed:
                    continue
                tried = scores.copy()
                tried[:, label] = candidates[:, word]
                reached = separation(tried, labels)
                if reached > best:
                    chosen[label], best, scores = word, reached, tried
    return chosen, best
