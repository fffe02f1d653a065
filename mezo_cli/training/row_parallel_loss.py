"""The loss of a batch whose rows are shared among ranks: each computes its rows, and all get the same loss.

What is exchanged per row and sign is what the loss needs: the loss of the row in float64, or, for accuracy and F1, the
predicted class. The mean over the rows is rounded once (`math.fsum`), so it is bitwise identical on every machine.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mezo_cli.distributed.ranks import Ranks
from mezo_cli.distributed.split import split_bounds, split_sizes
from mezo_cli.objectives.losses import Loss

NOT_FINITE = -1  # the class of a row with a score that is not finite


class RowParallelLoss:
    """A function of no arguments that returns the loss of all rows.

    Args:
        loss: one that `can_split_rows`.
        labels: the right label of every row of the batch, [rows].
        ranks: share the rows.
        scores: computes the label scores of this rank's rows, [own, labels], or [2, own, labels] under both signs.
    """

    def __init__(self, loss: Loss, labels: Tensor, ranks: Ranks, scores: Callable[[], Tensor]) -> None:
        self._loss, self._labels, self._ranks, self._scores = loss, labels, ranks, scores
        first, last = split_bounds(len(labels), ranks.rank, ranks.size)
        self._own_labels = labels[first:last]

    def __call__(self) -> Tensor:
        """Return the loss: float64 on the CPU, [], or [2] under both signs; nan if a label score is not finite."""
        scores = self._scores()
        own = scores.unsqueeze(0) if scores.dim() == 2 else scores  # [signs, own, labels]
        values = torch.stack([self._of_rows(one_sign) for one_sign in own], dim=1)  # [own, signs]
        sizes = split_sizes(len(self._labels), self._ranks.size)
        of_all = self._ranks.gather_parts(values, sizes, "step")
        losses = torch.tensor(
            [self._of_batch(one_sign, own.shape[-1]) for one_sign in of_all.unbind(dim=1)], dtype=torch.float64
        )
        return losses if scores.dim() == 3 else losses[0]

    def _of_rows(self, scores: Tensor) -> Tensor:
        """Return what the loss needs of each row: [own]."""
        finite = scores.isfinite().all(dim=-1)
        if self._loss.by_class:
            return torch.where(finite, scores.argmax(dim=-1), NOT_FINITE).to(torch.int32)
        assert self._loss.of_rows is not None
        losses = self._loss.of_rows(scores, self._own_labels.to(scores.device))
        return torch.where(finite, losses, math.nan).cpu().double()

    def _of_batch(self, values: Tensor, labels: int) -> float:
        """Return the loss of all rows from what was gathered of one sign: [rows]."""
        if not self._loss.by_class:
            return math.fsum(values.tolist()) / len(values)
        if bool((values == NOT_FINITE).any()):
            return math.nan
        return float(self._loss(one_hot(values.long(), labels), self._labels))
