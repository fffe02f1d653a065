"""Objective `lm`: how likely a decoder continues a prompt with each label word (paper, section 3.2: OPT).

The score of a label is the sum of the log-probabilities of its word's tokens after the prompt. The loss is
cross-entropy over the labels' scores.

The normalizer at the end of the prompt is the same for all labels. It cancels in every softmax over them, so it is left
out: where each word is a single token, only the last position goes through the head, and only the words' rows of the
head are computed. The further tokens of a word are normalized over the whole vocabulary, each after the tokens of the
word before it, a word start. Word starts follow the prompt (packed_decoder.py); one that a longer one begins with is
read there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.models import CAUSAL_LM, LoadedModel
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.packed_decoder import PackedDecoder
from mezo_cli.objectives.vocabulary import VocabularyHead
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks import LmEncoder


class CausalLabelScorer(Classification):
    """The label words' log-probabilities after the prompt, without the prompt's normalizer.

    `label_ids` are the tokens of each label's word, in label order.

    Attributes:
        engine: what computes `logits` instead of the model: an inference engine; None: the model.
    """

    model_kind = CAUSAL_LM
    encoder_class = LmEncoder

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        model, label_ids = loaded.model, encoder.label_ids
        self._head = VocabularyHead(model, forward, self._score_words, "lm")
        self._head.head.register_forward_pre_hook(self._select_positions)
        words = [tuple(word) for word in label_ids]
        starts = sorted({word[:n] for word in words for n in range(len(word))}, key=lambda p: (len(p), p))
        tokens = sorted({token for word in words for token in word})
        device = self._head.head.weight.device
        self._head_rows = torch.tensor(tokens).to(device)
        # Per word and token: the number of the word start before it (0: the prompt alone), and its head row's index.
        self._word_tokens = [
            (
                torch.tensor([starts.index(word[:n]) for n in range(len(word))]).to(device),
                torch.tensor([tokens.index(token) for token in word]).to(device),
            )
            for word in words
        ]
        # A word start is read in the first of the longest ones that begins with it, at its last token.
        self._longest = [p for p in starts if not any(len(q) > len(p) and q[: len(p)] == p for q in starts)]
        number_of = {p: next(i for i, q in enumerate(self._longest) if q[: len(p)] == p) for p in starts}
        self._ends = [(number_of[p], len(p) - 1) for p in starts]
        self.engine: Callable[[Batch], Tensor] | None = None
        self._whole_vocabulary = False  # score every word after the prompt instead of the label words
        extra = sum(map(len, self._longest))
        self._decoder = PackedDecoder(model, forward, lambda row: len(row.input_ids) + extra)
        self.supports_paired_forward, self.frozen = self._decoder.is_packed, self._decoder.frozen

    @staticmethod
    def reference_logits(model: Any, batch: Batch, label_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the scores by the model's own forward: each row with each word alone, over the whole vocabulary."""
        rows = []
        for row in batch.rows:
            for word in label_ids:
                ids = torch.tensor([*row.input_ids, *word]).to(batch.device)
                word_ids = ids[-len(word) :]
                logits = model(input_ids=ids.unsqueeze(0)).logits[0].float()[-len(word) - 1 : -1]
                scores = torch.cat([logits[:1], logits[1:].log_softmax(-1)])
                rows.append(scores.gather(1, word_ids.unsqueeze(1)).sum())
        return torch.stack(rows).view(len(batch.rows), len(label_ids))

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays:
        """Lay out prompts and label words for one forward."""
        arrays, place = self._decoder.lay_out([(row.input_ids, self._longest) for row in rows])
        ends = [[place(row, number, token) for row in range(len(rows))] for number, token in self._ends]
        return {**arrays, "scored_positions": np.array(ends)}

    def logits(self, batch: Batch) -> Tensor:
        """Return the labels' scores, float32: [rows, labels], or [2, rows, labels] in a paired forward."""
        return self._decoder.logits(batch).float().squeeze(0) if self.engine is None else self.engine(batch)

    def fits_paired_forward(self, batch: Batch) -> bool:
        """Return whether one forward should compute both signs; an engine makes batches of its own."""
        return self.engine is not None or super().fits_paired_forward(batch)

    def vocabulary_logits(self, batch: Batch) -> Tensor:
        """Return the logits of every token after the prompt, float32 [rows, tokens]."""
        self._whole_vocabulary = True
        try:
            return self._decoder.logits(batch).float().squeeze(0)
        finally:
            self._whole_vocabulary = False

    def output_layer(self) -> tuple[nn.Linear, Tensor]:
        """Return the head, and its rows of the label words, in label order."""
        for index, (word_starts, _) in enumerate(self._word_tokens):
            if len(word_starts) > 1:
                raise UserError(f"a linear probe needs label words of one token each, and number {index + 1} has more")
        return self._head.head, self._head_rows[torch.cat([rows for _, rows in self._word_tokens])]

    def _select_positions(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Keep only the hidden states that the head scores: [signs, 1 + word starts, rows, width].

        A hook before the head, so that the input of the head is what it scores: the linear probe reads it there.
        """
        return (self._decoder.states_at(args[0], self._decoder.layout["scored_positions"]),)

    def _score_words(self, hidden: Tensor) -> Tensor:
        """Replace the head's forward: [signs, 1 + word starts, rows, width] -> [signs, rows, labels], float32."""
        if self._whole_vocabulary:
            return self._head.logits(hidden[:, 0], torch.arange(self._head.words, device=hidden.device))
        logits = self._head.logits(hidden, self._head_rows)
        if len(self._ends) > 1:
            log_probs = logits[:, 1:] - self._head.log_normalizer(hidden[:, 1:]).unsqueeze(-1)
            logits = torch.cat([logits[:, :1], log_probs], dim=1)
        return torch.stack([logits[:, word_starts, :, rows].sum(0) for word_starts, rows in self._word_tokens], dim=-1)
