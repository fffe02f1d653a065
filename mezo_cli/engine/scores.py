"""The scores of objectives lm and choice, with an engine's forwards in place of the model's own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.engine.engine import Engine
from mezo_cli.engine.members import Members, token_scores
from mezo_cli.objectives.choice import Choice
from mezo_cli.objectives.collate import Batch
from mezo_cli.objectives.decoder import sum_of_candidates
from mezo_cli.objectives.lm import Lm
from mezo_cli.objectives.scoring import in_float64
from mezo_cli.tasks.choice import ChoiceRow

Scored = TypeVar("Scored", Lm, Choice)


class EngineScores:
    """What lets an engine score the label words of objective lm; both signs in one request."""

    @staticmethod
    def longest(own: Lm, rows: Sequence[TokenizedExample]) -> int:
        """Return the tokens of the longest prompt, with all of the longest word but its last token."""
        return max(len(row.input_ids) for row in rows) + max(map(len, own.label_ids)) - 1

    @staticmethod
    def attach(own: Lm, engine: Engine, rows: Sequence[TokenizedExample]) -> Lm:
        """Let an engine score the labels of an objective; compare some when it has just started."""
        members = engine.attach(own.loaded, own.forward)

        def log_probs(scores: Tensor) -> Tensor:
            return scores.double().log_softmax(-1)  # a prompt's normalizer may be left out

        return _attach(own, engine, rows, own.logits, partial(_label_scores, own, members), log_probs)


class EngineChoices:
    """What lets an engine score the candidates of objective choice."""

    @staticmethod
    def longest(own: Choice, rows: Sequence[ChoiceRow]) -> int:
        """Return the tokens of the longest prompt with its longest candidate, whose last token is only scored."""
        return max(len(row.input_ids) + max(map(len, row.candidates)) for row in rows) - 1

    @staticmethod
    def attach(own: Choice, engine: Engine, rows: Sequence[ChoiceRow]) -> Choice:
        """Let an engine score the candidates of an objective; compare some when it has just started."""
        members = engine.attach(own.loaded, own.forward)
        return _attach(own, engine, rows, own.log_probs, partial(_candidate_scores, members), lambda scores: scores)


def _attach(
    own: Scored,
    engine: Engine,
    rows: Sequence[TokenizedExample] | Sequence[ChoiceRow],
    compute: Callable[[Batch], Tensor],
    by_engine: Callable[[Batch], Tensor],
    comparable: Callable[[Tensor], Tensor],
) -> Scored:
    batch = own.collate(rows)
    engine.check(own.forward, lambda: comparable(compute(batch)), lambda: comparable(by_engine(batch)), len(rows))
    own.engine = by_engine
    return own


def _label_scores(own: Lm, members: Members, batch: Batch) -> Tensor:
    """Return what `Lm.logits` does."""
    texts = [([*row.input_ids, *word], len(word)) for row in batch.rows for word in own.label_ids]
    of_words = token_scores(members, texts).double().split([count for _, count in texts], dim=1)
    scores = torch.stack([of_word.sum(1) for of_word in of_words], dim=1).float()
    return scores.view(-1, len(batch.rows), len(own.label_ids)).to(batch.labels.device).squeeze(0)


def _candidate_scores(members: Members, batch: Batch) -> Tensor:
    """Return what `Choice.log_probs` does."""
    texts = [
        ([*row.input_ids, *ids], count)
        for row in batch.rows
        for ids, count in zip(row.candidates, row.scored, strict=True)
    ]
    return sum_of_candidates(in_float64(token_scores(members, texts).to(batch.labels.device)), batch.layout)
