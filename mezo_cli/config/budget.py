"""A budget of forwards: the steps that it pays for, which of them are evaluated, and the batch that a step takes.

The unit is one call: one pass over the batch with one weight set. A backward pass is one too; evaluations are not
counted (docs/bench.md).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mezo_cli.config.registry import OPTIMIZERS
from mezo_cli.config.schema import Config, SettingError


def with_budget(config: Config) -> Config:
    """Return the config with the most steps whose calls do not exceed `forwards`, if it is set."""
    if config.forwards is None:
        return config
    shown, chosen = f"forwards={config.forwards}", f"optimizer={config.optimizer.name}"
    first = calls(config, 1, 1)
    if not first:
        raise SettingError("forwards", f"{shown}: {chosen} takes no step: leave it out")
    if first > config.forwards:
        raise SettingError("forwards", f"{shown}: a step of {chosen} takes {first} forwards: give {first} or more")
    budget = range(config.forwards + 1)
    return replace(config, steps=bisect_right(budget, config.forwards, key=lambda n: calls(config, n, n)) - 1)


def calls(config: Config, steps: int, total: int | None = None) -> int:
    """Return the calls of the first `steps` steps of a run of `total` steps (`config.steps` if it is not given)."""
    optimizer: Any = OPTIMIZERS.load(config.optimizer.name)
    run = optimizer(config.optimizer, config.seed, config.steps if total is None else total)
    return sum(run.count_forwards(steps).values())


def steps_at(config: Config, forwards: Sequence[int]) -> frozenset[int]:
    """Return the numbers of steps after which so many calls are first reached; that of the last step for more."""
    steps = range(config.steps)
    return frozenset(bisect_left(steps, number, key=lambda n: calls(config, n)) for number in forwards)


def batch_number(config: Config, step: int) -> int:
    """Return the number of the batch that step number `step` (from 0) takes.

    With `forwards` it is half of the calls before it: a step of MeZO takes two, so that at equal calls every method
    stands at the same place of one stream of batches.
    """
    return step if config.forwards is None else calls(config, step) // 2
