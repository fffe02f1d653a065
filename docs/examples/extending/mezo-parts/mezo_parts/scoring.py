"""A loss and a metric: the multiclass hinge loss, and the mean recall of the labels."""

import numpy as np

from mezo_cli.objectives.scoring import Metric


def hinge(logits, labels):
    """Return max(0, 1 + the highest score of a wrong label - the score of the right one) of each row."""
    right = labels.unsqueeze(1)
    wrong = logits.scatter(1, right, float("-inf")).amax(1)
    return (1 + wrong - logits.gather(1, right).squeeze(1)).clamp(min=0).double()


def mean_recall(counts):
    """Return the mean recall of the labels that occur, from rows per label and prediction, [..., labels, labels]."""
    rows = counts.sum(axis=2)
    recall = np.diagonal(counts, axis1=1, axis2=2) / np.maximum(rows, 1)
    return recall.sum(axis=1) / (rows > 0).sum(axis=1)


balanced_accuracy = Metric(mean_recall, hub_name="balanced_accuracy")
