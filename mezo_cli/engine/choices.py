"""The candidates' log-probabilities of objective choice, with an engine's forwards in place of the model's own."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from mezo_cli.engine.engine import Engine
from mezo_cli.engine.members import Members
from mezo_cli.engine.token_scores import token_scores
from mezo_cli.objectives.choice import Choice, sum_of_candidates
from mezo_cli.objectives.collate import Batch
from mezo_cli.objectives.losses import in_float64
from mezo_cli.tasks.choice import ChoiceRow


class EngineChoices:
    """What lets an engine score the candidates of objective choice."""

    @staticmethod
    def longest(own: Choice, rows: Sequence[ChoiceRow]) -> int:
        """Return the tokens of the longest prompt with its longest candidate, whose last token is only scored."""
        return max(len(row.input_ids) + max(map(len, row.candidates)) for row in rows) - 1

    @staticmethod
    def attach(own: Choice, engine: Engine, rows: Sequence[ChoiceRow]) -> Choice:
        """Let an engine score the candidates of an objective; compare some when it has just started.

        Raises:
            UserError: when the engine does not support the model, or computes other scores.
        """
        members, batch = engine.attach(own.loaded, own.forward, raw_logits=False, stops=False), own.collate(rows)
        engine.check(own.forward, partial(own.log_probs, batch), partial(_log_probs, members, batch), len(rows))
        own.engine = partial(_log_probs, members)
        return own


def _log_probs(members: Members, batch: Batch) -> Tensor:
    """Return what `Choice.log_probs` does."""
    texts = [
        ([*row.input_ids, *ids], count)
        for row in batch.rows
        for ids, count in zip(row.candidates, row.scored, strict=True)
    ]
    return sum_of_candidates(in_float64(token_scores(members, texts).to(batch.device)), batch.layout)
