"""The interface of an optimizer: what its class declares, what a step returns, how a run is resumed; the learning rate.

A run can be interrupted after any step, so an optimizer is one of two kinds:

- `ReplayableOptimizer`: a step follows from a few scalars (a coefficient per direction, and lr), which the trajectory
  stores. The weights and the state of any step are rebuilt from them by the arithmetic of training. A state that takes
  long to rebuild can be stored in the checkpoint `last` as well.
- `StatefulOptimizer`: the state is stored beside the weights of the checkpoint `last`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from mezo_cli.config.schema import OptimizerConfig, StepRecord
from mezo_cli.errors import UserError
from mezo_cli.perturb.noise import to_float32

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.config.optimizers import FirstOrderConfig, PerturbationConfig
    from mezo_cli.perturb.forward import PerturbedForward
    from mezo_cli.perturb.params import Params


class LossFn(Protocol):
    """The loss of one fixed batch."""

    def __call__(self) -> "Tensor":
        """Return the loss: shape [], or [2] inside `forward.perturbed(direction, eps)` with both signs."""


@runtime_checkable
class PartsLossFn(LossFn, Protocol):
    """The loss of one fixed batch that is a sum over its micro-batches."""

    def parts(self) -> "Iterator[Tensor]":
        """Yield what each micro-batch adds to the loss, []: a gradient is then that of one after the other."""


@runtime_checkable
class RowLossFn(LossFn, Protocol):
    """The loss of one fixed batch that is the mean of its rows' losses."""

    def rows(self) -> "Tensor":
        """Return the losses of the rows: float64 [signs, rows], one sign outside `forward.perturbed`."""


@dataclass(frozen=True)
class StepResult:
    """The scalars of one step.

    Attributes:
        loss: what the progress line shows.
        recorded: the scalars from which, with `lr`, the step is replayed, in float32; empty without a trajectory.
        lr: the learning rate, rounded to float32 as the trajectory stores it.
        others: further fields of its line in metrics.jsonl.
    """

    loss: float
    recorded: list[float]
    lr: float
    others: dict[str, float]

    def scalars(self) -> dict[str, float]:
        """Return the fields of the step's line in metrics.jsonl: `loss` first, `lr` last."""
        return {"loss": self.loss, **self.others, "lr": self.lr}


class BaseOptimizer(Protocol):
    """Updates the trainable parameters, one step at a time.

    Class attributes:
        replayable: whether it is a `ReplayableOptimizer`.
        scalar: the name of the scalars that a step records, as in summary.json.
        symbol: their letter in formulas.
    """

    scalar: ClassVar[str] = "projected_grad"
    symbol: ClassVar[str] = "g"
    config: OptimizerConfig
    steps: int

    def __init__(self, config: Any, seed: int, steps: int) -> None: ...

    def check_tensors(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Reject settings that exclude the trained tensors.

        Args:
            shapes: name -> shape of each.
        """
        return None

    def step(self, forward: "PerturbedForward", loss_fn: LossFn, step: int) -> StepResult:
        """Take step number `step` (from 0). A loss that is not finite leaves the weights as they are."""

    def count_forwards(self, steps: int) -> dict[str, int]:
        """Return the number of `forwards` and `backwards` of a batch that the first `steps` steps take."""
        return self.config.count_forwards(steps, self.steps)


class ReplayableOptimizer(BaseOptimizer, Protocol):
    """An optimizer whose steps are replayed from the trajectory."""

    replayable: ClassVar[Literal[True]] = True

    def samples(self, step: int) -> int:
        """Return how many directions step `step` draws: so many scalars, the first of its record, are `scalar`."""

    def keep_start(self, params: "Params") -> None:
        """Copy the weights that the run began with, those of `params` now, if steps need them. By default do nothing.

        It is called before the first step, replay or rebuilding of the state in a process.
        """
        return None

    def rebuild_state(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild the state that the steps of `records` left, all steps from the first on; the weights stay."""

    def apply_updates(self, params: "Params", records: list[StepRecord]) -> None:
        """Update the weights by each record in order, with the arithmetic of `step`."""

    def save_state(self, path: Path) -> None:
        """Write the state to a file, to spare a resumed run `rebuild_state`. By default write no file."""
        return None

    def load_state(self, path: Path, step: int) -> None:
        """Read what `save_state` wrote after `step` steps, instead of `rebuild_state`."""
        raise UserError(f"{path}: this optimizer stores no state")


class StatefulOptimizer(BaseOptimizer, Protocol):
    """An optimizer whose state is stored in the checkpoint `last`. It leaves no trajectory."""

    replayable: ClassVar[Literal[False]] = False

    def save_state(self, path: Path) -> None:
        """Write the state to a file."""

    def load_state(self, path: Path) -> None:
        """Read what `save_state` wrote, before the first step."""


Optimizer = ReplayableOptimizer | StatefulOptimizer  # `replayable` tells which


def learning_rate(config: "PerturbationConfig | FirstOrderConfig", step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`, rounded to float32.

    `schedule: linear` and `cosine` (half a period) fall from lr at step 0 to 0 after the last step.
    """
    if config.schedule == "constant":
        return to_float32(config.lr)
    fraction = 1.0 - step / steps if config.schedule == "linear" else (1.0 + math.cos(math.pi * step / steps)) / 2
    return to_float32(config.lr * fraction)


def not_finite(result: StepResult) -> str:
    """Return "NAME is VALUE" for the first scalar of a step that is not finite, "" if all are.

    `loss` is looked at last: it may be the mean of others.
    """
    values = result.scalars()
    order = [*(name for name in values if name != "loss"), "loss"]
    return next((f"{name} is {values[name]}" for name in order if not math.isfinite(values[name])), "")
