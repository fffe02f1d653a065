"""Objective `mlm`: classification as filling in the mask with one of the label words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.objectives import packing
from mezo_cli.objectives.batches import Batch
from mezo_cli.params import Params


class LabelWords:
    """Objective `mlm`: the logits of the label words at the mask position (paper, section 3; LM-BFF).

    Only the mask position goes through the head, and only the label words' rows of the decoder are computed, from
    whatever weight the decoder holds: tied to the embeddings or its own.
    """

    def __init__(self, model: Any, params: Params, label_ids: Sequence[int]) -> None:
        decoder = model.get_output_embeddings()
        if not isinstance(decoder, nn.Linear):
            raise UserError(f"{type(model).__name__} has no decoder over the vocabulary: objective=mlm needs one")
        self._model, self._params, self._decoder = model, params, decoder
        self._rows = torch.tensor(list(label_ids), device=decoder.weight.device)
        self._mask: Tensor | None = None
        self._packed = packing.Packed(model, params) if packing.serves(model) else None
        params.leave(decoder)
        decoder.forward = self._label_rows  # type: ignore[method-assign,assignment]
        if self._packed is None:
            body = getattr(model, model.base_model_prefix)
            for child in model.children():
                if child is not body:
                    child.register_forward_pre_hook(self._at_mask)

    @staticmethod
    def stock(model: Any, batch: Batch, label_ids: Sequence[int]) -> Tensor:
        """Return the same scores by a model's own forward: all positions, the whole vocabulary, then pick."""
        scores = model(**batch.inputs()).logits
        return scores[torch.arange(len(batch.mask), device=scores.device), batch.mask][:, list(label_ids)]

    def carries(self, batch: Batch) -> bool:
        """Whether one forward should carry both sides of a step."""
        return self._packed is not None and self._packed.carries(batch)

    def logits(self, batch: Batch) -> Tensor:
        """Return the label words' scores, shape [rows, labels], or [2, rows, labels] for both sides; float32."""
        if self._packed is not None:
            return self._packed.logits(batch, batch.mask)
        self._mask = batch.mask
        return self._model(**batch.inputs()).logits.view(len(batch.mask), -1)

    def output(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the layer that scores the labels, and which of its rows do, in label order (None: all of them)."""
        return self._decoder, self._rows

    def _at_mask(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Cut a padded batch's hidden states down to the mask position: [rows, length, width] -> [rows, 1, width]."""
        if self._mask is None:
            return None
        mask, self._mask = self._mask, None
        rows = torch.arange(len(mask), device=mask.device)
        return (args[0][rows, mask].unsqueeze(1), *args[1:])

    def _label_rows(self, hidden: Tensor) -> Tensor:
        """Score the label words in float32, whatever the model computes in: it costs nothing.

        [sides * rows, 1, width] -> [sides, rows, labels].
        """
        weight = self._params.read(self._decoder.weight, self._rows, torch.float32)
        sides = weight.shape[0] if weight.dim() == 3 else 1
        scores = hidden.float().view(sides, -1, hidden.shape[-1]) @ weight.mT
        if self._decoder.bias is not None:
            scores = scores + self._params.read(self._decoder.bias, self._rows, torch.float32).unsqueeze(-2)
        return scores
