"""Objective `lm`: how likely a decoder continues a prompt with each label word (paper, section 3.2: OPT).

The score of a label is the sum of the log-probabilities of its word's tokens after the prompt. The loss is
cross-entropy over the labels' scores. The normalizer at the end of the prompt cancels there, so it is left out: where
each word is a single token, only the last position goes through the head, and only the words' rows of the head are
computed. The further tokens of a word are normalized over the whole vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.models import CAUSAL_LM, LoadedModel
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.decoder import CandidateScorer, plain_log_probs
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks import LmEncoder


class Lm(Classification):
    """The label words' log-probabilities after the prompt, without the prompt's normalizer.

    `label_ids` are the tokens of each label's word, in label order: the candidates of every row.
    """

    model_kind = CAUSAL_LM
    encoder_class = LmEncoder

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        lengths = list(map(len, self.label_ids))
        self.scorer = CandidateScorer(
            loaded.model, forward, lambda row: (row.input_ids, self.label_ids, lengths), "lm", normalizes_first=False
        )
        self.supports_paired_forward, self.frozen = self.scorer.is_packed, self.scorer.frozen

    @classmethod
    def plain_outputs(cls, loaded: LoadedModel, rows: Sequence[TokenizedExample], encoder: Any) -> Tensor:
        """Return the scores by the model's own forward: each row with each word alone, over the whole vocabulary."""
        words, scores = encoder.label_ids, list[Tensor]()
        for row in rows:
            texts = row.input_ids, words, list(map(len, words))
            scores += [plain_log_probs(loaded, texts, n, False).sum() for n in range(len(words))]
        return torch.stack(scores).view(len(rows), len(words))

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays:
        """Lay out prompts and label words for one forward."""
        return self.scorer.lay_out(rows)

    def logits(self, batch: Batch) -> Tensor:
        """Return the labels' scores, float32: [rows, labels], or [2, rows, labels] in a paired forward."""
        return self.scorer.log_probs(batch).float().squeeze(0)

    def fits_paired_forward(self, batch: Batch) -> bool:
        """Return whether one forward should compute both signs; an engine makes batches of its own."""
        return self.scorer.engine is not None or super().fits_paired_forward(batch)

    def vocabulary_logits(self, batch: Batch) -> Tensor:
        """Return the logits of every token after the prompt, float32 [rows, tokens]."""
        return self.scorer.vocabulary_logits(batch).squeeze(0)

    def output_layer(self) -> tuple[nn.Linear, Tensor]:
        """Return the head, and its rows of the label words, in label order."""
        for index, word in enumerate(self.label_ids):
            if len(word) > 1:
                raise UserError(f"a linear probe needs label words of one token each, and number {index + 1} has more")
        head = self.scorer.head
        return head, torch.tensor([word[0] for word in self.label_ids]).to(head.weight.device)
