"""The settings of the built-in optimizers: one class for those that draw z, one for those that differentiate the loss.

Settings of one method alone are in its module.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from mezo_cli.config.schema import OptimizerConfig, Positive, SettingError
from mezo_cli.config.values import Number, Text
from mezo_cli.optim.clip import ClipBound

if TYPE_CHECKING:
    from mezo_cli.perturb.noise import Noise

Schedule = Literal["constant", "linear", "cosine"]
SampleSchedule = Literal["constant", "linear"]
NotNegativeNumber = Annotated[Number, Field(ge=0.0)]
PositiveNumber = Annotated[Number, Field(gt=0.0)]
MomentDecay = Annotated[Number, Field(ge=0.0, le=0.9999)]
Samples = Annotated[Positive, Field(le=10_000)]
SlowMomentDecay = Annotated[Number, Field(ge=0.0, le=0.999999)]
CLIP_WINDOW = 100
CLIP_SETTINGS = ("clip_g", "clip_window")  # the header of a trajectory has them apart
ClipWindow = Annotated[Positive, Field(le=100_000)]


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

    def make_noise(self) -> "Noise":
        """Return a new noise, from which forwards and updates get z."""
        from mezo_cli.perturb.noise import make_noise

        return make_noise(self.noise)

    @property
    def clip_settings(self) -> dict[str, Any] | None:
        """The settings by which g is clipped, as the header of a trajectory has them; None: it is not."""
        return None


@dataclass(frozen=True)
class ZerothOrderConfig(PerturbationConfig):
    """Settings of an optimizer whose gradient estimates are g z.

    Attributes:
        samples: n of n-SPSA: directions per step.
        sample_schedule: linear: from 1 to `samples` over the run.
        noise: distribution of z; torch: for comparison with the published code only.
        schedule: learning rate schedule.
        clip_g: bound on the size of g: a number, or a running quantile of these sizes, e.g. `q0.99`; null: none.
        clip_window: the number of sizes of g of which the quantile is taken.
    """

    samples: Samples = 1
    sample_schedule: SampleSchedule = "constant"
    noise: Text = "gaussian"
    schedule: Schedule = "constant"
    clip_g: ClipBound | None = None
    clip_window: ClipWindow = CLIP_WINDOW

    @property
    def directions(self) -> int:
        """`samples`."""
        return self.samples

    @property
    def clip_settings(self) -> dict[str, Any] | None:
        """`clip_g` and `clip_window`."""
        return None if self.clip_g is None else {name: getattr(self, name) for name in CLIP_SETTINGS}

    def check_clip(self) -> None:
        """Reject a window where no quantile is taken."""
        if self.clip_window != CLIP_WINDOW and not (self.clip_g or "").startswith("q"):
            why = f"it is read with a quantile only, e.g. optimizer.clip_g=q0.99 (now {self.clip_g or 'null'})"
            raise SettingError("optimizer.clip_window", f"optimizer.clip_window={self.clip_window}: {why}")


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
