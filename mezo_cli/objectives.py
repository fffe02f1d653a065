"""What a batch is judged by: label words at the mask (`mlm`), a classification head (`cls`), or label words that a
decoder goes on with (`lm`, in `next_words`); and the losses.

All give logits of shape [rows, labels]; the loss reads them. Cross-entropy over the label words is continuous, which
is what gives MeZO a signal: accuracy, on a small batch, seldom changes between theta + eps z and theta - eps z, so
that its projected gradient is exactly zero (paper, section 3.3, trains on accuracy with large batches).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezo_cli import packing
from mezo_cli.batches import Batch
from mezo_cli.errors import UserError
from mezo_cli.next_words import NextWords
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


# How far the scores may be from those of the stock forward, as a share of the largest: rounding, and no more.
ROUNDING = {"cpu": 1e-4}
COARSE_ROUNDING = 1e-2  # a GPU may multiply in TF32


def check_served(ours: Tensor, stock: Tensor, device: str, name: str) -> None:
    """Refuse a model of a family that an objective does not serve: its scores differ from the model's own.

    Args:
        ours, stock: scores of the same rows by an objective and by the stock forward, [rows, labels], in float32.
        device: its type.
        name: the model's, for the error line.

    Raises:
        UserError: also when the stock scores are not finite, which means damaged weights.
    """
    if not bool(stock.isfinite().all()):
        raise UserError(f"{name}: its scores are not finite: the weights are damaged")
    allowed = ROUNDING.get(device, COARSE_ROUNDING) * float(stock.abs().max())
    error = float((ours - stock).abs().max()) if ours.shape == stock.shape else float("inf")
    if not error <= allowed:
        raise UserError(f"{name} is a family that is not served: its scores come out wrong (by {error:.2g})")


OBJECTIVES: dict[str, type[LabelWords] | type[ClassHead] | type[NextWords]] = {
    "mlm": LabelWords,
    "cls": ClassHead,
    "lm": NextWords,
}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood of the right label among the labels."""
    return F.cross_entropy(logits, labels)


def accuracy_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """1 - accuracy of the batch: piecewise constant, no gradient needed (paper, section 3.3)."""
    return 1.0 - (logits.argmax(dim=-1) == labels).float().mean()


def f1_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """1 - F1 of the batch: of label 1 with two labels, macro-averaged with more; 0/0 counts as 0."""
    predicted = logits.argmax(dim=-1)
    classes = [1] if logits.shape[-1] == 2 else list(range(logits.shape[-1]))
    scores = []
    for label in classes:
        hits = ((predicted == label) & (labels == label)).sum()
        both = (predicted == label).sum() + (labels == label).sum()
        scores.append(2 * hits / both.clamp(min=1))
    return 1.0 - torch.stack(scores).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "accuracy": accuracy_loss,
    "f1": f1_loss,
}
