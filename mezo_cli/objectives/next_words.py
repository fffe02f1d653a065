"""Objective `lm`: how likely a decoder goes on with each label word after the prompt (paper, section 3.2: OPT).

The score of a label is the sum of the log-probabilities of its word's tokens after the prompt, and the loss is
cross-entropy over the labels' scores. The normaliser at the end of the prompt is one number for all labels, so it
cancels in every softmax over them, and it is left out: where each word is a single token, only the last position goes
through the head, and only the words' rows of it are computed. Further tokens of a word are normalised over the whole
vocabulary, each at the word's beginning that precedes it; beginnings that words share are computed once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.models import heads
from mezo_cli.objectives import decoders, packing
from mezo_cli.objectives.batches import CARRIED, Batch
from mezo_cli.params import Params

_VOCABULARY_AT_ONCE = 8192  # rows of the head displaced and multiplied at a time: bounds the memory for a normaliser


class NextWords:
    """The label words' log-probabilities after the prompt, up to the prompt's own normaliser.

    Args:
        model: a causal language model.
        params: the lens that its weights are seen through.
        label_ids: the tokens of each label's word, in label order.
    """

    def __init__(self, model: Any, params: Params, label_ids: Sequence[Sequence[int]]) -> None:
        head = heads.over_vocabulary(model)
        if head is None:
            raise UserError(f"{type(model).__name__} has no head over the vocabulary: objective=lm needs one")
        self._model, self._params, self._head = model, params, head
        words = [tuple(word) for word in label_ids]
        # Beginnings of words: the model is fed them after the prompt, to be asked for the token that comes next.
        beginnings = sorted({word[:n] for word in words for n in range(1, len(word))}, key=lambda b: (len(b), b))
        tokens = sorted({token for word in words for token in word})
        asked = [(), *beginnings]
        device = head.weight.device
        self._beginnings = beginnings
        self._rows = torch.tensor(tokens, device=device)
        # For each word: after which beginning (0: the prompt alone) its tokens are asked for, and in which row of ours.
        self._spelled = [
            (
                torch.tensor([asked.index(word[:n]) for n in range(len(word))], device=device),
                torch.tensor([tokens.index(token) for token in word], device=device),
            )
            for word in words
        ]
        self._batch: Batch | None = None
        self._inputs: tuple[dict[str, Any], Tensor] = ({}, self._rows)
        self._at = self._rows
        self._packs = decoders.packs(model)
        if self._packs:
            decoders.enable(model)
        params.leave(head)
        head.forward = self._scores  # type: ignore[method-assign,assignment]
        head.register_forward_pre_hook(self._where_asked)

    @staticmethod
    def stock(model: Any, batch: Batch, label_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the same scores by a model's own forward: each row with each word alone, the whole vocabulary."""
        rows = []
        for ids, real in zip(batch.ids, batch.attention.bool(), strict=True):
            for word in label_ids:
                follows = torch.tensor(list(word), device=ids.device)
                logits = model(input_ids=torch.cat([ids[real], follows]).unsqueeze(0)).logits[0].float()
                seen = logits[-len(word) - 1 : -1]
                seen = torch.cat([seen[:1], seen[1:].log_softmax(-1)])
                rows.append(seen.gather(1, follows.unsqueeze(1)).sum())
        return torch.stack(rows).view(len(batch.ids), len(label_ids))

    def carries(self, batch: Batch) -> bool:
        """Whether one forward should carry both sides of a step: z is drawn once then, but activations take twice."""
        return self._packs and self._params.carries and batch.tokens <= CARRIED

    def logits(self, batch: Batch) -> Tensor:
        """Return the labels' scores, shape [rows, labels], or [2, rows, labels] for both sides; float32."""
        if batch is not self._batch:  # the step may ask twice for the same batch
            lay = decoders.pack if self._packs else decoders.pad
            self._batch, self._inputs = batch, lay(batch.ids, batch.attention, self._beginnings)
        inputs, self._at = self._inputs
        if self._params.sides == 1:
            return self._model(**inputs, use_cache=False).logits.float().squeeze(0)
        with self._params.together():
            return self._model(**packing.of_both(inputs), use_cache=False).logits

    def output(self) -> tuple[nn.Linear, Tensor]:
        """Return the head, and which of its rows score the labels, in label order: a linear probe is written there.

        Raises:
            UserError: when a word has several tokens: no one row of the head is its.
        """
        for row, (after, _) in enumerate(self._spelled):
            if len(after) > 1:
                raise UserError(f"a linear probe needs label words of one token each, and number {row + 1} has more")
        return self._head, self._rows[torch.cat([row for _, row in self._spelled])]

    def _where_asked(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Cut hidden states of all positions down to where a token is asked for: [sides, 1 + beginnings, rows, width].

        In front of the head, so that what is seen to enter it is what it scores.
        """
        states = args[0] if self._packs else args[0].flatten(0, 1).unsqueeze(0)
        return (states[:, self._at].float(),)

    def _scores(self, asked: Tensor) -> Tensor:
        """Stand for the head: -> [sides, rows, labels], float32."""
        told = self._linear(asked, self._rows)
        if self._beginnings:
            told = torch.cat([told[:, :1], told[:, 1:] - self._normaliser(asked[:, 1:]).unsqueeze(-1)], dim=1)
        return torch.stack([told[:, after, :, row].sum(0) for after, row in self._spelled], dim=-1)

    def _linear(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Multiply [sides, beginnings, rows, width] by some rows of the head.

        In float32, whatever the model computes in: what tells two labels apart is a small part of their logits.
        """
        weight = self._params.read(self._head.weight, rows, torch.float32)
        scores = hidden @ (weight if weight.dim() == 2 else weight.unsqueeze(1)).mT
        if self._head.bias is not None:
            bias = self._params.read(self._head.bias, rows, torch.float32)
            scores = scores + (bias if bias.dim() == 1 else bias[:, None, None])
        return scores

    def _normaliser(self, hidden: Tensor) -> Tensor:
        """Return the log of the sum of exponentials over the whole vocabulary, shape [sides, beginnings, rows]."""
        vocabulary = torch.arange(len(self._head.weight), device=hidden.device)
        parts = [self._linear(hidden, rows).logsumexp(-1) for rows in vocabulary.split(_VOCABULARY_AT_ONCE)]
        return torch.stack(parts).logsumexp(0)
