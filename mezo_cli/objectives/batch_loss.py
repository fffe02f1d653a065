"""The loss of one fixed batch, put together from its micro-batches and from the ranks that share its rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mezo_cli.distributed.ranks import ALONE, Ranks, split_sizes
from mezo_cli.errors import UserError
from mezo_cli.objectives.base import Objective
from mezo_cli.objectives.scoring import mean_over_rows


class BatchLoss:
    """A function of no arguments that returns the loss of a batch with the weights as `objective.forward` has them.

    Args:
        objective: computes losses of rows, or counts.
        batches: the batch, or its micro-batches: one forward each.
        ranks: those that share its rows, of which `batches` are this rank's; `ALONE` if this process has all of them.
        rows: the number of rows of the whole batch, for ranks.
        weights: what the loss of each row of the whole batch is multiplied by; None for 1.
    """

    def __init__(
        self,
        objective: Objective,
        batches: Sequence[Any],
        ranks: Ranks = ALONE,
        rows: int = 0,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._objective, self._batches, self._rows, self._ranks = objective, batches, rows, ranks
        self._weights = weights
        if weights is not None and objective.loss_from_counts:
            raise UserError(
                f"objective.loss={objective.config.objective.loss}: it is no mean over rows, so that data.weights=mean "
                "has no rows to weight; use data.weights=none, or data.batches=shuffled"
            )

    def __call__(self) -> Tensor:
        """Return the loss, float64 (float32 on MPS), [], or [2] inside `forward.perturbed` with both signs.

        It is nan if an output of the model is not finite, and differentiable under `torch.enable_grad`.
        """
        if self._objective.loss_from_counts:
            own = self._of_members(lambda: torch.stack(list(map(self._objective.counts, self._batches))).sum(dim=0))
            counts = self._ranks.gather_parts(own.unsqueeze(0), [1] * self._ranks.size, "step").sum(dim=0)
            losses = self._objective.from_counts(counts)
        else:
            losses = torch.stack([mean_over_rows(of_rows) for of_rows in self.rows()])
        return losses if self._objective.forward.num_signs == 2 else losses[0]

    def rows(self) -> Tensor:
        """Return the losses of the rows, times their weights: [1, rows], or [2, rows] inside `forward.perturbed`."""
        losses = self._of_members(lambda: torch.cat(list(map(self._objective.row_losses, self._batches)), dim=1))
        losses = self._ranks.gather_parts(losses.mT, split_sizes(self._rows, self._ranks.size), "step").mT
        return losses if self._weights is None else losses * losses.new_tensor(self._weights)

    def _of_members(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` does for each weight set: one sign after the other where a batch does not fit."""
        forward = self._objective.forward
        if forward.num_signs == 2 and not all(map(self._objective.fits_paired_forward, self._batches)):
            return forward.forward_per_sign(compute).flatten(0, 1)
        return compute()
