"""What every method's step takes and gives, and the learning rate of a step."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from mezo_cli.params import Params
from mezo_cli.schema import OptimizerConfig

# The loss of one fixed batch wherever the parameters are seen: float32 [], or [2] inside `params.at(z, c, -c)`.
LossFn = Callable[[], Tensor]


class StepResult(Protocol):
    """What one step saw and did."""

    @property
    def loss(self) -> float:
        """The loss that is shown."""

    @property
    def projected_grads(self) -> list[float]:
        """With `lr`, the scalars that the step can be replayed from; none for a method without a trajectory."""

    @property
    def lr(self) -> float:
        """The learning rate, rounded to float32 as the trajectory stores it."""

    def scalars(self) -> dict[str, float]:
        """Return what a line of metrics.jsonl says of the step: `loss` first, `lr` last."""


class Optimizer(Protocol):
    """A method that moves the parameters step by step. `schema.METHODS` says whether it leaves a trajectory."""

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None: ...

    def step(self, params: Params, loss_fn: LossFn, step: int) -> StepResult:
        """Do step number `step` (from 0). A loss that is not finite moves nothing."""

    def passes(self, steps: int) -> dict[str, int]:
        """Return how many `forwards` and `backwards` of a batch the first `steps` steps take."""


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`: constant, or falling linearly to 0 behind the last step.

    It is rounded to float32, as the trajectory stores it.
    """
    fraction = 1.0 if config.schedule == "constant" else 1.0 - step / steps
    return float(np.float32(config.lr * fraction))


def not_finite(result: StepResult) -> str:
    """Say which of a step's scalars is no number; empty when all are. `loss`, a mean of others, comes last."""
    values = result.scalars()
    order = [*(name for name in values if name != "loss"), "loss"]
    return next((f"{name} is {values[name]}" for name in order if not math.isfinite(values[name])), "")
