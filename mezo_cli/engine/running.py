"""The engine of a run while it trains. Only a run that has one imports it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mezo_cli.config.registry import ENGINE_OBJECTIVES
from mezo_cli.config.schema import Config
from mezo_cli.runs import Run

if TYPE_CHECKING:
    from mezo_cli.engine.engine import Engine


@contextmanager
def running_engine(
    config: Config, run: Run, session: Any, rows: Mapping[str, Sequence[Any]]
) -> Iterator["Engine | None"]:
    """Yield the run's engine, which computes the session's forwards from then on; None for a run without one.

    `rows` are those of each split.
    """
    if config.engine.name == "none":
        del session  # which is replaced at the end of a run: memory may not hold two models
        yield None
        return
    from mezo_cli.engine.engine import Engine

    longest = ENGINE_OBJECTIVES.load(config.objective.name).longest
    engine = Engine(config, max(longest(session.objective, of) for of in rows.values() if of))
    try:
        engine.serve(session, rows["train"])
        run.update(engine=engine.record)
        del session  # as above
        yield engine
    finally:
        engine.close()
