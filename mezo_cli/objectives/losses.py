"""The losses of label scores: from the scores, [rows, labels], and the right labels, [rows], to the loss of each row.

A loss that is no mean over rows follows from the number of rows per label and prediction instead. Losses are computed
and summed in float64: MeZO takes the difference of two losses that nearly agree. Torch is imported as a loss is
computed: settings are checked without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mezo_cli.config.registry import LOSSES
from mezo_cli.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss, given by one of two functions. A plain function is a differentiable loss of rows.

    Attributes:
        of_rows: returns the loss of each row, [rows], from label scores, [rows, labels], and right labels, [rows].
        of_counts: returns the loss from the number of rows per label and prediction, float64 [labels, labels].
        differentiable: whether it has a gradient; optimizers that take one refuse a loss that has none.
    """

    of_rows: "LossFunction | None" = None
    of_counts: "Callable[[Tensor], Tensor] | None" = None
    differentiable: bool = True

    def __call__(self, scores: "Tensor", labels: "Tensor") -> "Tensor":
        """Return the loss of label scores, [rows, labels], and right labels, [rows]: a scalar."""
        if self.of_rows is not None:
            return mean_over_rows(self.of_rows(scores, labels))
        assert self.of_counts is not None
        return self.of_counts(count_predictions(scores, labels))


def find_loss(name: str) -> Loss:
    """Return the loss that `objective.loss` names."""
    loss = LOSSES.load(name)
    return loss if isinstance(loss, Loss) else Loss(partial(_checked, name, loss))


def _checked(name: str, loss: "LossFunction", scores: "Tensor", labels: "Tensor") -> "Tensor":
    """Return what a plain function of another package does, which must be one number per row."""
    losses = loss(scores, labels)
    if losses.shape != labels.shape:
        shape = list(losses.shape)
        raise UserError(f"objective.loss={name}: it returned {shape} for {len(labels)} rows, not one number per row")
    return losses


def mean_over_rows(losses: "Tensor") -> "Tensor":
    """Return the mean of the losses of rows, [rows] -> [], added in the order in which `F.cross_entropy` adds them."""
    import torch.nn.functional as F

    return F.nll_loss(-losses.unsqueeze(1), losses.new_zeros(len(losses)).long())


def count_predictions(scores: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the number of rows per label and prediction, float64 [labels, labels]; nan if a score is not finite."""
    import torch
    import torch.nn.functional as F

    count = scores.shape[-1]
    predicted = in_float64(F.one_hot(scores.argmax(dim=-1), count))
    counts = in_float64(F.one_hot(labels, count)).mT @ predicted
    return torch.where(scores.isfinite().all(), counts, float("nan"))


def _cross_entropy(scores: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the negative log-likelihood of the right label among the labels."""
    import torch.nn.functional as F

    return F.cross_entropy(in_float64(scores), labels, reduction="none")


def _accuracy_loss(counts: "Tensor") -> "Tensor":
    """Return 1 - accuracy of the batch: piecewise constant, without a gradient (paper, section 3.3)."""
    return 1.0 - counts.trace() / counts.sum()


def _f1_loss(counts: "Tensor") -> "Tensor":
    """Return 1 - F1 of the batch: of label 1 with two labels, macro-averaged with more; 0/0 counts as 0."""
    of_each = 2 * counts.diagonal() / (counts.sum(dim=0) + counts.sum(dim=1)).clamp(min=1)
    return 1.0 - (of_each[1:] if len(counts) == 2 else of_each).mean()


def in_float64(values: "Tensor") -> "Tensor":
    """Return values in float64; in float32 on MPS, which has no float64."""
    return values.float() if values.device.type == "mps" else values.double()


cross_entropy = Loss(_cross_entropy)
accuracy_loss = Loss(of_counts=_accuracy_loss, differentiable=False)
f1_loss = Loss(of_counts=_f1_loss, differentiable=False)
