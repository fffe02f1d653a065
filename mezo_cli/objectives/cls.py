"""Objective `cls`: a classification head on the plain text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.models import SEQUENCE_CLASSIFIER, LoadedModel
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.packed_encoder import pack_encoder
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks import ClsEncoder


class ClassHeadScorer(Classification):
    """The logits of transformers' sequence-classification head.

    In the model families that are packed the head reads the first token of a row.
    """

    model_kind = SEQUENCE_CLASSIFIER
    encoder_class = ClsEncoder

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        model = loaded.model
        self._packed = pack_encoder(model, forward)
        self.supports_paired_forward = self._packed is not None
        self.frozen = None if self._packed is None else self._packed.frozen
        layers = _label_layers(model)
        if layers:
            self._label_layer = layers[-1]
            forward.unpatch(self._label_layer)
            self._label_layer.forward = self._score_labels  # type: ignore[method-assign,assignment]

    @staticmethod
    def reference_logits(model: Any, batch: Batch, label_ids: Sequence[int]) -> Tensor:
        """Return the logits of the padded batch."""
        return model(**batch.inputs()).logits

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays | None:
        """Pack rows, where the model's family is supported."""
        return None if self._packed is None else self._packed.lay_out(rows, [0] * len(rows))

    def logits(self, batch: Batch) -> Tensor:
        """Return the head's logits, float32: [rows, labels], or [2, rows, labels] in a paired forward."""
        if self._packed is not None:
            return self._packed.logits(batch).float()
        return self.model(**batch.inputs()).logits.float()

    def output_layer(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the last linear layer over the labels, of which all rows score labels.

        Raises:
            UserError: when the head's last layer is not linear.
        """
        layers = _label_layers(self.model)
        if not layers:
            labels = self.model.config.num_labels
            raise UserError(f"{type(self.model).__name__} has no linear layer over its {labels} classes")
        return layers[-1], None

    def _score_labels(self, hidden: Tensor) -> Tensor:
        """Replace the forward of the layer over the labels: [signs * rows, ..., width] -> [signs * rows, ..., labels].

        Computed in float32 whatever the compute dtype is: for a few rows this costs nothing.
        """
        weight = self.forward.perturbed_weight(self._label_layer.weight, None, torch.float32)
        signs = len(weight) if weight.dim() == 3 else 1
        scores = hidden.float().reshape(signs, -1, hidden.shape[-1]) @ weight.mT
        if self._label_layer.bias is not None:
            scores = scores + self.forward.perturbed_weight(self._label_layer.bias, None, torch.float32).unsqueeze(-2)
        return scores.view(*hidden.shape[:-1], -1)


def _label_layers(model: Any) -> list[nn.Linear]:
    """Return the linear layers over the labels; of a head that an adapter has copied, the copy is the last."""
    labels = model.config.num_labels
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == labels]
