"""Let an inference engine compute the forwards of a run: start it for a session, and give it the next session."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mezo_cli.config.registry import ENGINE_OBJECTIVES
from mezo_cli.config.schema import Config
from mezo_cli.runs import Run
from mezo_cli.training.session import Session

if TYPE_CHECKING:  # a run without an engine imports nothing of it
    from mezo_cli.engine.engine import Engine

CHECKED_ROWS = 2  # whose scores are compared at the start


@contextmanager
def running_engine(config: Config, run: Run, session: Session, *splits: Sequence[Any]) -> Iterator["Engine | None"]:
    """Yield the run's engine, which computes the session's forwards from then on; None without one.

    Args:
        config: of the run.
        run: its directory.
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

    longest = ENGINE_OBJECTIVES.load(config.objective.name).longest
    engine = Engine(config, max(longest(session.objective, rows) for rows in splits if rows))
    try:
        attach(engine, session, splits[0])
        run.update(engine=engine.record)
        del session  # as above
        yield engine
    finally:
        engine.close()


def attach(engine: "Engine", session: Session, rows: Sequence[Any]) -> None:
    """Let a running engine compute a session's forwards, with the session's weights."""
    by_engine = ENGINE_OBJECTIVES.load(session.config.objective.name)
    session.objective = by_engine.attach(session.objective, engine, rows[:CHECKED_ROWS])
