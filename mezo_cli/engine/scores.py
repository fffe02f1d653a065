"""The label scores of objective lm, with an engine's forwards in place of the model's own."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.engine.engine import Engine
from mezo_cli.engine.members import Members
from mezo_cli.engine.token_scores import token_scores
from mezo_cli.models import CAUSAL_LM
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.tasks import LmEncoder


class EngineScores(Classification):
    """The label words' scores after the prompt, as `objectives.lm` defines them; both signs in one request.

    Args:
        own: the run's objective, whose model computes nothing here; its `forward` says with which weights to compute.
        members: asks the engine.
    """

    model_kind = CAUSAL_LM
    encoder_class = LmEncoder
    supports_paired_forward = True

    def __init__(self, own: Classification, members: Members) -> None:
        super().__init__(own.config, own.loaded, own.forward, own.encoder)
        self._members = members

    @staticmethod
    def longest(own: Classification, rows: Sequence[TokenizedExample]) -> int:
        """Return the tokens of the longest prompt, with all of the longest word but its last token."""
        return max(len(row.input_ids) for row in rows) + max(map(len, own.label_ids)) - 1

    @staticmethod
    def attach(own: Classification, engine: Engine, rows: Sequence[TokenizedExample]) -> Classification:
        """Return the objective whose scores an engine computes; compare some when it has just started.

        Raises:
            UserError: when the engine does not support the model, or computes other scores.
        """
        words, batch = max(map(len, own.label_ids)), own.collate(rows)
        members = engine.attach(own.loaded, own.forward, raw_logits=words == 1, stops=False)
        scores = EngineScores(own, members)
        engine.check(own.forward, partial(_log_probs, own, batch), partial(_log_probs, scores, batch), len(rows))
        return scores

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays:
        """Lay out nothing: the engine takes the tokens of the rows."""
        return {}

    def fits_paired_forward(self, batch: Batch) -> bool:
        """Return True: the engine makes batches of its own."""
        return True

    def logits(self, batch: Batch) -> Tensor:
        """Return the labels' scores, float32: [rows, labels], or [2, rows, labels] under both signs."""
        texts = [([*row.input_ids, *word], len(word)) for row in batch.rows for word in self.label_ids]
        of_words = token_scores(self._members, texts).double().split([count for _, count in texts], dim=1)
        scores = torch.stack([of_word.sum(1) for of_word in of_words], dim=1).float()
        scores = scores.view(-1, len(batch.rows), len(self.label_ids)).to(batch.device)
        return scores if self.forward.num_signs == 2 else scores[0]


def _log_probs(objective: Classification, batch: Batch) -> Tensor:
    """Return the log-probabilities of the labels: a prompt's normalizer may be left out of its scores."""
    return objective.logits(batch).double().log_softmax(-1)
