"""The label scores of objective lm, with an engine's forwards in place of the model's own."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.engine.engine import Engine
from mezo_cli.engine.members import Members
from mezo_cli.models import CAUSAL_LM
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.tasks import LmEncoder


class EngineScores(Classification):
    """The label words' scores after the prompt, as `objectives.lm` defines them; both signs in one request.

    After each prompt, and after each start of a word behind it, the engine scores the tokens that continue some word.

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
        self._words = [tuple(word) for word in self.label_ids]
        self._starts = sorted({word[:n] for word in self._words for n in range(len(word))}, key=lambda p: (len(p), p))
        self._next = [
            sorted({word[len(start)] for word in self._words if word[: len(start)] == start and word != start})
            for start in self._starts
        ]

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
        prompts = [[*row.input_ids, *start] for row in batch.rows for start in self._starts]
        of_signs = self._members.ask("score", prompts=prompts, tokens=self._next * len(batch.rows))
        count = len(self._starts)
        scores = torch.tensor(
            [[self._of_row(rows[i : i + count]) for i in range(0, len(rows), count)] for rows in of_signs]
        ).to(batch.device)
        return scores if self.forward.num_signs == 2 else scores[0]

    def _of_row(self, scores: list[list[float]]) -> list[float]:
        """Return the score of each label of a row: the sum over its word's tokens."""
        by_start = {
            start: dict(zip(tokens, of_start, strict=True))
            for start, tokens, of_start in zip(self._starts, self._next, scores, strict=True)
        }
        return [sum(by_start[word[:n]][word[n]] for n in range(len(word))) for word in self._words]


def _log_probs(objective: Classification, batch: Batch) -> Tensor:
    """Return the log-probabilities of the labels: a prompt's normalizer may be left out of its scores."""
    return objective.logits(batch).double().log_softmax(-1)
