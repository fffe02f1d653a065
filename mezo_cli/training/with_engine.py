"""Let an inference engine compute the label scores of a run: start it for a session, and give it the next session."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.objectives.classification import Classification
from mezo_cli.training.session import Session

if TYPE_CHECKING:  # a run without an engine imports nothing of it
    from mezo_cli.engine.engine import Engine

CHECKED_ROWS = 2  # whose scores are compared at the start


@contextmanager
def running_engine(config: Config, session: Session, *splits: Sequence[TokenizedExample]) -> Iterator["Engine | None"]:
    """Yield the run's engine, which computes the session's scores from then on; None without one.

    Args:
        config: of the run.
        session: at the weights that training begins from.
        splits: the rows of train, and all others that will be scored.

    Raises:
        UserError: when the engine is not installed, does not start, or does not support the model.
    """
    if config.engine.name == "none":
        del session  # which is replaced at the end of a run: memory may not hold two models
        yield None
        return
    from mezo_cli.engine.engine import Engine

    longest = max(len(row.input_ids) for split in splits for row in split)
    engine = Engine(config, longest + max(map(len, session.encoder.label_ids)) - 1)
    try:
        attach(engine, session, splits[0])
        del session  # as above
        yield engine
    finally:
        engine.close()


def attach(engine: "Engine", session: Session, rows: Sequence[TokenizedExample]) -> None:
    """Let a running engine compute a session's scores, with the session's weights."""
    own = session.objective
    assert isinstance(own, Classification)  # the only family that an engine takes over (config/rules.py)
    session.objective = engine.objective(session.loaded, session.forward, own, own.collate(rows[:CHECKED_ROWS]))
