"""The losses: from the labels' scores, [rows, labels], and the right labels, [rows], to a scalar.

They are computed and summed over the rows in float64: MeZO takes the difference of two losses that nearly agree.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the right label among the labels."""
    return F.cross_entropy(_in_float64(logits), labels)


def accuracy_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 - accuracy of the batch: piecewise constant, without a gradient (paper, section 3.3)."""
    return 1.0 - _in_float64(logits.argmax(dim=-1) == labels).mean()


def f1_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 - F1 of the batch: of label 1 with two labels, macro-averaged with more; 0/0 counts as 0."""
    predicted = logits.argmax(dim=-1)
    classes = [1] if logits.shape[-1] == 2 else list(range(logits.shape[-1]))
    scores = []
    for label in classes:
        hits = ((predicted == label) & (labels == label)).sum()
        both = (predicted == label).sum() + (labels == label).sum()
        scores.append(_in_float64(2 * hits) / both.clamp(min=1))
    return 1.0 - torch.stack(scores).mean()


def _in_float64(values: Tensor) -> Tensor:
    """Return values in float64; in float32 on MPS, which has no float64."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)
