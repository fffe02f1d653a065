"""A loaded model with all that computes its loss and takes a step: loss, micro-batches, ranks, one step."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.models import LoadedModel
from mezo_cli.models.parameter_names import count_parameters
from mezo_cli.objectives.base import Objective
from mezo_cli.objectives.collate import Batch, collate
from mezo_cli.objectives.losses import find_loss
from mezo_cli.optim import LossFn, Optimizer, StepResult
from mezo_cli.optim.dropout import dropout
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.params import Params
from mezo_cli.tasks import ClassificationEncoder
from mezo_cli.training.row_parallel_loss import RowParallelLoss


@dataclass
class Session:
    """A loaded model with its trainable parameters, objective, optimizer and input encoder.

    Attributes:
        loaded: the model and its tokenizer.
        forward: the model's forwards with perturbed weights, and the trainable parameters.
        objective: computes label scores: `objective.logits(batch)`.
        optimizer: updates the parameters.
        encoder: encodes rows for the model.
        ranks: the processes that share the run's steps and evaluations; None if this one is alone.
    """

    config: Config
    loaded: LoadedModel
    forward: PerturbedForward
    objective: Objective
    optimizer: Optimizer
    encoder: ClassificationEncoder
    ranks: Ranks | None = None

    @property
    def params(self) -> Params:
        """The trainable tensors."""
        return self.forward.params

    def batch(self, rows: Sequence[TokenizedExample]) -> Batch:
        """Collate rows as the objective reads them, on the model's device."""
        loaded = self.loaded
        return collate(rows, loaded.pad_id, loaded.device, loaded.uses_token_type_ids, self.objective.lay_out)

    def loss_of(self, rows: Sequence[TokenizedExample]) -> LossFn:
        """Return a function that computes the loss of these rows, which are laid out once, in micro-batches.

        Where ranks share the rows, each computes the label scores of its own, and all get the loss of all rows.
        """
        if self.ranks is None or self.ranks.split != "rows":
            return partial(self.loss, *self.micro_batches(rows))
        own = self.micro_batches(self.ranks.own(rows))
        labels = torch.tensor([row.label for row in rows])
        return RowParallelLoss(
            find_loss(self.config.objective.loss), labels, self.ranks, partial(self.label_scores, *own)
        )

    def micro_batches(self, rows: Sequence[TokenizedExample]) -> list[Batch]:
        """Collate rows as batches of `micro_batch_size` rows: the whole batch as one where that is null."""
        size = self.config.micro_batch_size or len(rows)
        return [self.batch(rows[start : start + size]) for start in range(0, len(rows), size)]

    def loss(self, *batches: Batch) -> Tensor:
        """Return the objective's loss of a batch with the weights as `self.forward` has them.

        It is differentiable under `torch.enable_grad`.

        Args:
            batches: the batch, or its micro-batches: one forward each, then one loss over the label scores of all rows.

        Returns:
            float64 (float32 on MPS), [], or [2] inside `forward.perturbed` with both signs; nan if a logit is not
            finite.
        """
        logits, labels = self.label_scores(*batches), torch.cat([batch.labels for batch in batches])
        if logits.dim() == 3:
            return torch.stack([self._loss(scores, labels) for scores in logits])
        return self._loss(logits, labels)

    def label_scores(self, *batches: Batch) -> Tensor:
        """Return the label scores of micro-batches: [rows, labels], or [2, rows, labels] under both signs."""
        if self.forward.num_signs == 2 and not all(map(self.objective.fits_paired_forward, batches)):
            return self.forward.forward_per_sign(lambda: self.label_scores(*batches))
        return torch.cat([self.objective.logits(batch) for batch in batches], dim=-2)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = find_loss(self.config.objective.loss)(logits, labels)
        # The accuracy and f1 losses would count a logit that is not finite as a wrong prediction. No value is read: the
        # host would wait for the device.
        return torch.where(logits.isfinite().all(), loss, math.nan)

    def step(self, rows: Sequence[TokenizedExample], step: int) -> StepResult:
        """Do step number `step` (from 0) on a batch of rows."""
        # MeZO runs without dropout (paper, section 2); the model is in eval mode.
        uses_dropout = self.optimizer.needs_backward
        with dropout(self.loaded.model, self.config.seed, step) if uses_dropout else nullcontext():
            return self.optimizer.step(self.forward, self.loss_of(rows), step)

    def exclude_unreachable(self, row: TokenizedExample, batch: Sequence[TokenizedExample] = ()) -> list[str]:
        """Exclude the parameters that the loss does not depend on; return their names.

        Args:
            row: a row whose forward shows it.
            batch: rows that may reach what this row does not: the experts of a mixture, a branch for long texts.
        """
        everything = self.params.tensors
        frozen = self.objective.frozen if self.config.model.cache_frozen == "auto" else None
        with nullcontext() if frozen is None else frozen.find():
            unreachable = self.forward.select_reachable(lambda: self.objective.logits(self.batch([row])))
        if not batch:
            return unreachable
        known = self.objective.frozen
        count = 0 if known is None else known.count
        if known is not None:
            known.count = 0  # a layer that seems frozen may have an expert that is trained
        left = self.forward.add_reachable(everything, lambda: self.label_scores(*self.micro_batches(batch)))
        if known is not None and len(left) == len(unreachable):
            known.count = count
        return left

    def keep_states(self, *splits: Sequence[TokenizedExample]) -> int:
        """Keep what frozen layers compute for all rows of a split, from when they are first needed.

        A split that would not fit in `model.cache_bytes` beside those before it is left out: which rows are kept
        decides the last bits of a loss, so it must not depend on the order of the batches.

        Returns:
            The memory that the states will take, in bytes.
        """
        frozen, used = self.objective.frozen, 0
        if frozen is None or not frozen.count:
            return used
        for rows in splits:
            needed = frozen.bytes_of(rows)
            if used + needed <= self.config.model.cache_bytes:
                frozen.keep(rows, self.config.eval_batch_size, self.batch)
                used += needed
        return used

    def trainable(self) -> dict[str, Any]:
        """Return the `count` of trainable scalars, their `share` of the model's, and the `names` of the tensors."""
        count, names = self.params.count, list(self.params.tensors)
        return {"count": count, "share": count / count_parameters(self.loaded.model), "names": names}
