"""Objective `cls`: a classification head on the plain text."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError
from mezo_cli.models import SEQUENCE_CLASSIFIER, LoadedModel
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Batch
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
        self._pack()
        layers = _label_layers(loaded.model)
        if layers:
            self._label_layer = layers[-1]
            forward.unpatch(self._label_layer)
            self._label_layer.forward = self._score_labels  # type: ignore[method-assign,assignment]

    @staticmethod
    def reference_logits(model: Any, batch: Batch, label_ids: Sequence[int]) -> Tensor:
        """Return the logits of the padded batch."""
        return model(**batch.inputs()).logits

    def logits(self, batch: Batch) -> Tensor:
        """Return the head's logits, float32: [rows, labels], or [2, rows, labels] in a paired forward."""
        if self._packed is not None:
            return self._packed.logits(batch).float()
        return self.model(**batch.inputs()).logits.float()

    def output_layer(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the last linear layer over the labels, of which all rows score labels."""
        layers = _label_layers(self.model)
        if not layers:
            labels = self.model.config.num_labels
            raise UserError(f"{type(self.model).__name__} has no linear layer over its {labels} classes")
        return layers[-1], None

    def _score_labels(self, hidden: Tensor) -> Tensor:
        """Replace the label layer's forward: [signs * rows, ..., width] -> [signs * rows, ..., labels], float32."""
        return self._linear_in_float32(self._label_layer, None, hidden).view(*hidden.shape[:-1], -1)


def _label_layers(model: Any) -> list[nn.Linear]:
    """Return the linear layers over the labels; of a head that an adapter has copied, the copy is the last."""
    labels = model.config.num_labels
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == labels]
