"""Multiply hidden states by rows of the head over the vocabulary, as the forward sees them: perturbed.

Computed in float32 whatever the compute dtype is: scores differ by little against their size. What is computed over the
whole vocabulary is computed in parts, so that no [positions, vocabulary] is ever in memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezo_cli.errors import UserError
from mezo_cli.perturb.forward import PerturbedForward

_ROWS = 8192  # of the head that are perturbed and multiplied at a time
_POSITIONS = 256  # that they are multiplied with at a time


class VocabularyHead:
    """The head of a decoder, with the weights that are active in `forward`.

    Args:
        model: the decoder.
        forward: perturbs its weights.
        score: replaces the head's forward.
        objective: for the error line.

    Attributes:
        head: the linear layer over the vocabulary. Where `peft` trains a copy of it, that copy: it computes.
    """

    def __init__(
        self, model: Any, forward: PerturbedForward, score: Callable[[Tensor], Tensor], objective: str
    ) -> None:
        head = model.get_output_embeddings()
        head = head.modules_to_save["default"] if hasattr(head, "original_module") else head
        if not isinstance(head, nn.Linear):
            raise UserError(f"{type(model).__name__} has no head over the vocabulary: objective={objective} needs one")
        self.head, self._forward = head, forward
        forward.unpatch(head)
        head.forward = score  # type: ignore[method-assign,assignment]

    @property
    def words(self) -> int:
        """The number of tokens of the vocabulary."""
        return len(self.head.weight)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Multiply hidden states, [signs, any, positions, width], by some rows: [signs, any, positions, rows]."""
        return _multiply(hidden, *self._weights(rows))

    def token_logits(self, hidden: Tensor, positions: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        """Return the logit of one token at each position: float32 [signs, n].

        Args:
            hidden: [signs, positions, width].
            positions: numbers of positions, some more than once perhaps, [n].
            tokens: the token at each of them, as its number in `rows`, [n].
            rows: the rows of the head that are needed.
        """
        weight, bias = self._weights(rows)
        parts = [
            (hidden[:, at] * weight[..., token, :]).sum(-1)
            for at, token in zip(positions.split(_POSITIONS), tokens.split(_POSITIONS), strict=True)
        ]
        logits = torch.cat(parts, dim=-1)
        return logits if bias is None else logits + bias[..., tokens]

    def log_normalizer(self, hidden: Tensor) -> Tensor:
        """Return the log of the sum of exponentials over the vocabulary: float32 [signs, any, positions].

        A gradient computes the parts again, and keeps none of them.
        """
        vocabulary = torch.arange(self.words, device=hidden.device).split(_ROWS)
        if torch.is_grad_enabled():
            parts = [checkpoint(self._log_sum, hidden, rows, use_reentrant=False) for rows in vocabulary]
        else:
            parts = [self._log_sum(hidden, rows) for rows in vocabulary]
        return torch.stack(parts).logsumexp(0)

    def _log_sum(self, hidden: Tensor, rows: Tensor) -> Tensor:
        weights = self._weights(rows)
        parts = [_multiply(some, *weights).logsumexp(-1) for some in hidden.split(_POSITIONS, dim=-2)]
        return torch.cat(parts, dim=-1)

    def _weights(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return rows of the weight and of the bias, float32, with a dimension of 2 signs in a paired forward."""
        weight = self._forward.perturbed_weight(self.head.weight, rows, torch.float32)
        if self.head.bias is None:
            return weight, None
        return weight, self._forward.perturbed_weight(self.head.bias, rows, torch.float32)


def _multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ (weight if weight.dim() == 2 else weight.unsqueeze(1)).mT
    if bias is not None:
        logits = logits + (bias if bias.dim() == 1 else bias[:, None, None])
    return logits
