"""The interface of an objective: from a batch to a score per label."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.models import ModelKind
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.frozen_layers import FrozenLayers
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks import ClassificationEncoder


class Objective:
    """Computes label scores. A subclass has its name in `OBJECTIVES`, or in the entry-point group `mezo.objectives`.

    Class attributes:
        model_kind: the kind of model that is loaded.
        encoder_class: turns a task's rows into token ids.

    Attributes:
        supports_paired_forward: whether `logits` can compute both signs of a perturbation in one forward.
        frozen: the model's lowest layers, whose output `logits` computes once per batch if they are not trained; None
            if it does not.

    Args:
        model: a loaded model of `model_kind`.
        forward: runs it with perturbed weights. Its modules are patched, so `model(...)` sees them too.
        label_ids: the encoder's `label_ids`, one entry per label; empty where there are no label words.
    """

    model_kind: ClassVar[ModelKind]
    encoder_class: ClassVar[type[ClassificationEncoder]]
    supports_paired_forward = False
    frozen: FrozenLayers | None = None

    def __init__(self, model: Any, forward: PerturbedForward, label_ids: Sequence[Any]) -> None:
        self.model, self.forward, self.label_ids = model, forward, label_ids

    @staticmethod
    def reference_logits(model: Any, batch: Batch, label_ids: Sequence[Any]) -> Tensor:
        """Return the same scores by the model's own forward, as plainly as possible: [rows, labels].

        It is called before the model is patched. At every start the scores of two rows are checked against it.
        """
        raise NotImplementedError

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays | None:
        """Return the arrays that `logits` reads as `batch.layout`; None if it reads `batch.inputs()`, padded rows.

        They are made on the host, so that a batch is copied to the device once and nothing waits for it.
        """
        return None

    def logits(self, batch: Batch) -> Tensor:
        """Return the labels' scores, float32: [rows, labels], or [2, rows, labels] under both signs of a perturbation.

        The second shape is asked for only where `fits_paired_forward` returned True.
        """
        raise NotImplementedError

    def vocabulary_logits(self, batch: Batch) -> Tensor | None:
        """Return the score of every word of the vocabulary at the scored position, float32 [rows, words].

        The label words' columns are their scores, if each is one token. None for an objective that scores no words.
        """
        return None

    def fits_paired_forward(self, batch: Batch) -> bool:
        """Return whether one forward should compute both signs: that draws z once, but takes more memory."""
        if not (self.supports_paired_forward and self.forward.supports_paired_forward):
            return False
        return batch.tokens <= self.forward.paired_tokens

    def output_layer(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the layer that scores the labels, and its rows that do, in label order (None: all of them).

        A linear probe is written to these rows.

        Raises:
            UserError: when there is no such layer.
        """
        raise UserError(f"init=linear_probe: {type(self).__name__} has no output layer for a probe")
