"""The settings of the built-in optimizers: one class for those that draw z, one for those that differentiate the loss.

Settings of one method alone are in its module.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from mezo_cli.config.schema import OptimizerConfig, Positive
from mezo_cli.config.values import Number, Text

Schedule = Literal["constant", "linear"]
NotNegativeNumber = Annotated[Number, Field(ge=0.0)]
PositiveNumber = Annotated[Number, Field(gt=0.0)]
MomentDecay = Annotated[Number, Field(ge=0.0, le=0.9999)]
Samples = Annotated[Positive, Field(le=10_000)]
SlowMomentDecay = Annotated[Number, Field(ge=0.0, le=0.999999)]


@dataclass(frozen=True)
class PerturbationConfig(OptimizerConfig):
    """Settings of an optimizer whose updates are sums of c z over directions; a class of it has `noise` and `schedule`.

    Attributes:
        lr: learning rate.
        eps: scale of the perturbation.
        weight_decay: weight decay, of every tensor.
    """

    eps: PositiveNumber = 1e-3
    weight_decay: NotNegativeNumber = 0.0

    @property
    @abstractmethod
    def noise(self) -> str:
        """The distribution of z."""

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """The learning rate schedule."""

    @property
    @abstractmethod
    def directions(self) -> int:
        """The most directions of a step: a record of the trajectory has a scalar for each."""


@dataclass(frozen=True)
class ZerothOrderConfig(PerturbationConfig):
    """Settings of an optimizer whose gradient estimates are g z.

    Attributes:
        samples: n of n-SPSA: directions per step.
        sample_schedule: linear: from 1 to `samples` over the run.
        noise: distribution of z; torch: for comparison with the published code only.
        schedule: learning rate schedule.
    """

    samples: Samples = 1
    sample_schedule: Schedule = "constant"
    noise: Text = "gaussian"
    schedule: Schedule = "constant"

    @property
    def directions(self) -> int:
        """`samples`."""
        return self.samples


@dataclass(frozen=True)
class FirstOrderConfig(OptimizerConfig):
    """Settings of an optimizer by backpropagation.

    Attributes:
        lr: learning rate.
        weight_decay: weight decay, of every tensor.
        schedule: learning rate schedule.
        max_grad_norm: clip the gradient's norm to this; null: never.
        dropout: dropout rate in training; null: the model's own.
    """

    weight_decay: NotNegativeNumber = 0.0
    schedule: Schedule = "constant"
    max_grad_norm: PositiveNumber | None = 1.0
    dropout: Annotated[Number, Field(ge=0.0, le=0.9)] | None = None


def zeroth_order(config: OptimizerConfig) -> PerturbationConfig:
    """Return the settings of an optimizer that draws z; the defaults for one that draws none."""
    return config if isinstance(config, PerturbationConfig) else ZerothOrderConfig()
