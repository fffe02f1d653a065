"""The losses: from the labels' scores, [rows, labels], and the right labels, [rows], to a scalar.

They are computed and summed over the rows in float64: MeZO takes the difference of two losses that nearly agree.
A run asks a loss what it needs to know of it (`Loss`). Torch is imported as a loss is computed: settings are checked
without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mezo_cli.config.registry import LOSSES

if TYPE_CHECKING:
    from torch import Tensor

    LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss, and what a run needs to know of it. A plain function is a loss with the defaults.

    Attributes:
        compute: returns the loss of label scores, [rows, labels], and right labels, [rows].
        differentiable: whether it has a gradient; optimizers that take one refuse a loss that has none.
        of_rows: returns the loss of each row, [rows], of a loss that is their mean; None for any other.
        by_class: whether it follows from the predicted classes alone. Ranks share the rows of a batch where the loss
            can be put together: from `of_rows`, or from the predicted classes.
    """

    compute: "LossFunction"
    differentiable: bool = True
    of_rows: "LossFunction | None" = None
    by_class: bool = False

    @property
    def can_split_rows(self) -> bool:
        """Whether ranks can share the rows of a batch."""
        return self.by_class or self.of_rows is not None

    def __call__(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        """Return the loss of label scores, [rows, labels], and right labels, [rows]: a scalar."""
        return self.compute(logits, labels)


def find_loss(name: str) -> Loss:
    """Return the loss that `objective.loss` names.

    Raises:
        UserError: for an unknown name, and for a plug-in that cannot be imported.
    """
    loss = LOSSES.load(name)
    return loss if isinstance(loss, Loss) else Loss(loss)


def _cross_entropy(logits: "Tensor", labels: "Tensor", reduction: str = "mean") -> "Tensor":
    """Return the negative log-likelihood of the right label among the labels: its mean over the rows."""
    import torch.nn.functional as F

    return F.cross_entropy(_in_float64(logits), labels, reduction=reduction)


def _cross_entropy_of_rows(logits: "Tensor", labels: "Tensor") -> "Tensor":
    return _cross_entropy(logits, labels, "none")


def _accuracy_loss(logits: "Tensor", labels: "Tensor") -> "Tensor":
    """Return 1 - accuracy of the batch: piecewise constant, without a gradient (paper, section 3.3)."""
    return 1.0 - _in_float64(logits.argmax(dim=-1) == labels).mean()


def _f1_loss(logits: "Tensor", labels: "Tensor") -> "Tensor":
    """Return 1 - F1 of the batch: of label 1 with two labels, macro-averaged with more; 0/0 counts as 0."""
    import torch

    predicted = logits.argmax(dim=-1)
    classes = [1] if logits.shape[-1] == 2 else list(range(logits.shape[-1]))
    scores = []
    for label in classes:
        hits = ((predicted == label) & (labels == label)).sum()
        both = (predicted == label).sum() + (labels == label).sum()
        scores.append(_in_float64(2 * hits) / both.clamp(min=1))
    return 1.0 - torch.stack(scores).mean()


def _in_float64(values: "Tensor") -> "Tensor":
    """Return values in float64; in float32 on MPS, which has no float64."""
    return values.float() if values.device.type == "mps" else values.double()


cross_entropy = Loss(_cross_entropy, of_rows=_cross_entropy_of_rows)
accuracy_loss = Loss(_accuracy_loss, differentiable=False, by_class=True)
f1_loss = Loss(_f1_loss, differentiable=False, by_class=True)
