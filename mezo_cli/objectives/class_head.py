"""Objective `cls`: a classification head on the plain input."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.objectives import packing
from mezo_cli.objectives.batches import Batch
from mezo_cli.params import Params


class ClassHead:
    """Objective `cls`: transformers' sequence-classification head on the plain input.

    The heads of families that are packed read a row's first token.
    """

    def __init__(self, model: Any, params: Params, label_ids: Sequence[int]) -> None:
        self._model = model
        self._packed = packing.Packed(model, params) if packing.serves(model) else None

    @staticmethod
    def stock(model: Any, batch: Batch, label_ids: Sequence[int]) -> Tensor:
        """Return the same scores by a model's own forward."""
        return model(**batch.inputs()).logits

    def carries(self, batch: Batch) -> bool:
        """Whether one forward should carry both sides of a step."""
        return self._packed is not None and self._packed.carries(batch)

    def logits(self, batch: Batch) -> Tensor:
        """Return the head's scores, shape [rows, labels], or [2, rows, labels] for both sides; float32."""
        if self._packed is not None:
            return self._packed.logits(batch, torch.zeros_like(batch.mask)).float()
        return self._model(**batch.inputs()).logits.float()

    def output(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the layer that scores the labels, and which of its rows do (None: all of them).

        Raises:
            UserError: for a head whose last layer is not linear.
        """
        labels = self._model.config.num_labels
        layers = [m for m in self._model.modules() if isinstance(m, nn.Linear) and m.out_features == labels]
        if not layers:
            raise UserError(f"{type(self._model).__name__} has no linear layer over its {labels} classes")
        return layers[-1], None
