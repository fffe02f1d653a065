"""The engine of a run while it trains, or the null object of a run without one. Only a run that has one imports it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mezo_cli.config.registry import ENGINE_OBJECTIVES
from mezo_cli.config.schema import Config
from mezo_cli.optim import Optimizer, StepResult
from mezo_cli.perturb.params import Params
from mezo_cli.runs import Run

if TYPE_CHECKING:
    from mezo_cli.engine.engine import Engine


class NoEngine:
    """The model computes its own forwards: there is nothing to keep up to date, to check or to release."""

    def serve(self, session: Any, rows: Sequence[Any]) -> None:
        """Leave the session's forwards to its model."""

    def update(self, optimizer: Optimizer, step: int, result: StepResult) -> None:
        """Follow no step."""

    def check_weights(self, params: Params) -> None:
        """Check nothing."""

    def release(self) -> None:
        """Let go of nothing."""


@contextmanager
def running_engine(
    config: Config, run: Run, session: Any, rows: Mapping[str, Sequence[Any]]
) -> Iterator["Engine | NoEngine"]:
    """Yield the run's engine, which computes the session's forwards from then on; `rows` are those of each split."""
    if config.engine.name == "none":
        del session  # which is replaced at the end of a run: memory may not hold two models
        yield NoEngine()
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
