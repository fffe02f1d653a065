"""The settings of the built-in optimizers: what each takes and needs, and its implementation. Nothing imports torch."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, WrapValidator

from mezo_cli.config.base import (
    Conflicts,
    Entry,
    Flag,
    NotNegativeNumber,
    Number,
    Positive,
    PositiveNumber,
    Text,
    Whole,
    number_or_auto,
    refused,
)
from mezo_cli.config.registry import NOISES
from mezo_cli.config.schema import OptimizerConfig

Schedule = Literal["constant", "linear", "cosine"]
SampleSchedule = Literal["constant", "linear"]
MomentDecay = Annotated[Number, Field(ge=0.0, le=0.9999)]
SlowMomentDecay = Annotated[Number, Field(ge=0.0, le=0.999999)]
Samples = Annotated[Positive, Field(le=10_000)]
CLIP_WINDOW = 100
CLIP_SETTINGS = ("clip_g", "clip_window")  # the header of a trajectory has them apart


def _bound(value: Any) -> str:
    """Return a bound as it is stored: `0.5`, or `q0.99`."""
    text = str(value)
    quantile = text.startswith("q")
    try:
        number = math.nan if isinstance(value, bool) else float(text.removeprefix("q"))
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf and (number <= 1 or not quantile)):
        raise refused(f"={text}: allowed are a number above 0, and a quantile of |g| from above q0 to q1, e.g. q0.99")
    return f"q{number:g}" if quantile else repr(number)


Rate = Annotated[Number, WrapValidator(number_or_auto)]
NoiseName = Annotated[Text, AfterValidator(NOISES.check), WithJsonSchema({"enum": [*NOISES.rows]})]
ClipBound = Annotated[str, BeforeValidator(_bound)]


class PerturbationConfig(OptimizerConfig):
    """Settings of an optimizer whose updates are sums of c z over directions."""

    eps: PositiveNumber = Field(1e-3, description="scale of the perturbation")
    weight_decay: NotNegativeNumber = Field(0.0, description="weight decay, of every tensor")
    noise: NoiseName = Field("gaussian", description="distribution of z; torch: as the published code")
    schedule: Schedule = Field("constant", description="learning rate schedule")

    @property
    def directions(self) -> int:
        """The most directions of a step: it draws so many z."""
        raise NotImplementedError

    @property
    def record_width(self) -> int:
        """The most scalars that a record of the trajectory has of a step: one per direction."""
        return self.directions

    @property
    def points(self) -> int:
        """The most points of a step, which ranks share: it computes the losses of both signs at each direction."""
        return self.directions

    def make_noise(self) -> Any:
        """Return a new noise, from which forwards and updates get z."""
        return NOISES.load(self.noise)()


class ZerothOrderConfig(PerturbationConfig):
    """Settings of an optimizer whose gradient estimates are g z."""

    samples: Samples = Field(1, description="n of n-SPSA: directions per step")
    sample_schedule: SampleSchedule = Field("constant", description="linear: from 1 to `samples` over the run")
    clip_g: ClipBound | None = Field(None, description="bound on |g|: a number, or a running quantile, e.g. `q0.99`")
    clip_window: Positive = Field(CLIP_WINDOW, le=100_000, description="the number of |g| that the quantile is of")

    @property
    def directions(self) -> int:
        """`samples`."""
        return self.samples

    def samples_at(self, step: int, total: int) -> int:
        """Return n_t, the number of directions that step `step` (from 0) of `total` draws."""
        n = self.samples
        return n if self.sample_schedule == "constant" else min(n, 1 + n * step // total)

    def count_forwards(self, steps: int, total: int) -> dict[str, int]:
        """Return two forwards per sample, and no backward."""
        n = self.samples
        drawn = n * steps
        if self.sample_schedule == "linear":  # n_t > k from step ceil(k total / n) on
            drawn = steps + sum(max(0, steps + (-k * total) // n) for k in range(1, n))
        return {"forwards": 2 * drawn, "backwards": 0}


class MezoConfig(ZerothOrderConfig):
    """Settings of MeZO."""

    implementation: ClassVar[str] = "mezo_cli.optim.mezo:Mezo"
    title: ClassVar[str] = "MeZO"
    adds_directions: ClassVar[bool] = True
    lr: Rate = Field(1e-6, ge=0.0, le=3e38, description="learning rate; auto: the best of four tried rates")


class NullSignsConfig(MezoConfig):
    """Settings of MeZO with random signs."""

    implementation: ClassVar[str] = "mezo_cli.optim.mezo:NullSigns"
    title: ClassVar[str] = "null (random signs)"
    has_engine: ClassVar[bool] = False
    lr: Number = Field(1e-6, ge=0.0, le=3e38, description="learning rate")


class MezoMomentumConfig(ZerothOrderConfig):
    """Settings of MeZO with momentum."""

    implementation: ClassVar[str] = "mezo_cli.optim.mezo:MezoMomentum"
    title: ClassVar[str] = "MeZO-momentum"
    momentum: MomentDecay = Field(0.9, description="decay of the momentum buffer")


class AdamMoments(OptimizerConfig):
    """The settings of Adam's moments."""

    beta1: MomentDecay = Field(0.9, description="decay of Adam's first moment")
    beta2: SlowMomentDecay = Field(0.999, description="decay of Adam's second moment")
    adam_eps: PositiveNumber = Field(1e-8, description="added to the root of Adam's second moment")


class MezoAdamConfig(AdamMoments, ZerothOrderConfig):
    """Settings of MeZO-Adam."""

    implementation: ClassVar[str] = "mezo_cli.optim.mezo:MezoAdam"
    title: ClassVar[str] = "MeZO-Adam"


class EsConfig(PerturbationConfig):
    """Settings of evolution strategies."""

    implementation: ClassVar[str] = "mezo_cli.optim.es:Es"
    title: ClassVar[str] = "Evolution strategies"
    members: Whole = Field(30, ge=2, le=10_000, description="N, the size of the population: forwards per step")
    antithetic: Flag = Field(False, description="whether members are pairs of both signs of one direction")
    shaping: Literal["zscore", "std", "centered_rank", "sign", "none"] = Field(
        "zscore", description="what a member's reward becomes before it weights its direction"
    )
    shaping_std: Literal["members", "rows"] = Field(
        "members", description="what `shaping` divides by: the standard deviation over members, or over all their rows"
    )
    baseline: Literal["mean", "theta"] = Field(
        "mean", description="what is subtracted from the rewards: their mean, or the reward of the weights themselves"
    )
    anchor: dict[Entry, Number] | None = Field(None, description="decay to the start, `{l2: LAMBDA}` or `{l1: LAMBDA}`")

    @property
    def directions(self) -> int:
        """The directions of a step."""
        return self.members // 2 if self.antithetic else self.members

    @property
    def adds_directions(self) -> bool:
        """Whether there is no anchor, which needs the weights of the start."""
        return self.anchor is None

    def count_forwards(self, steps: int, total: int) -> dict[str, int]:
        """Return one forward per member, and one at theta where it is the baseline."""
        return {"forwards": steps * (self.members + (self.baseline == "theta")), "backwards": 0}

    def conflicts(self) -> Conflicts:
        """Reject settings without effect beside others, an odd number of pairs, and an anchor but l1 and l2."""
        chosen, anchor = f"optimizer.shaping={self.shaping}", self.anchor
        if self.antithetic and self.members % 2:
            yield "optimizer.members", "with optimizer.antithetic=true members are pairs: give an even number"
        if self.shaping_std == "rows" and self.shaping not in ("zscore", "std"):
            yield "optimizer.shaping_std", f"{chosen} divides by no standard deviation, only zscore and std do"
        if self.baseline == "theta" and self.shaping in ("zscore", "centered_rank"):
            yield "optimizer.baseline", f"it has no effect with {chosen}, only with std, sign and none"
        if self.baseline == "theta" and self.antithetic and self.shaping != "sign":
            why = "it cancels in the pairs of optimizer.antithetic=true, unless optimizer.shaping=sign"
            yield "optimizer.baseline", f"{why} (now {self.shaping})"
        if anchor is not None and (len(anchor) != 1 or not {*anchor} <= {"l1", "l2"} or min(anchor.values()) <= 0):
            yield "optimizer.anchor", "give {l2: LAMBDA} or {l1: LAMBDA}, LAMBDA above 0"
        if anchor is not None and self.lr * anchor.get("l2", 0.0) >= 1:
            yield "optimizer.anchor", f"times optimizer.lr={self.lr:g} it is 1 or more: give less"


class FzooConfig(EsConfig):
    """Settings of FZOO: the population step with those of its paper, which are in its file."""

    title: ClassVar[str] = "FZOO"


class FirstOrderConfig(OptimizerConfig):
    """Settings of an optimizer by backpropagation."""

    replayable: ClassVar[bool] = False
    needs_backward: ClassVar[bool] = True
    weight_decay: NotNegativeNumber = Field(0.0, description="weight decay, of every tensor")
    schedule: Schedule = Field("constant", description="learning rate schedule")
    max_grad_norm: PositiveNumber | None = Field(1.0, description="clip the gradient's norm to this; null: never")
    dropout: Annotated[Number, Field(ge=0.0, le=0.9)] | None = Field(None, description="dropout rate; null: its own")

    def count_forwards(self, steps: int, total: int) -> dict[str, int]:
        """Return one forward and one backward per step."""
        return {"forwards": steps, "backwards": steps}


class AdamWConfig(AdamMoments, FirstOrderConfig):
    """Settings of AdamW."""

    implementation: ClassVar[str] = "mezo_cli.optim.first_order:AdamW"
    title: ClassVar[str] = "FT"


class SgdConfig(FirstOrderConfig):
    """Settings of SGD."""

    implementation: ClassVar[str] = "mezo_cli.optim.first_order:Sgd"
    title: ClassVar[str] = "FT-SGD"
    momentum: MomentDecay = Field(0.9, description="decay of the momentum buffer")


class LinearProbeConfig(OptimizerConfig):
    """Settings of a run of no steps, whose model `init=linear_probe` has fitted."""

    implementation: ClassVar[str] = "mezo_cli.optim.mezo:LinearProbe"
    title: ClassVar[str] = "LP"


def zeroth_order(config: OptimizerConfig) -> PerturbationConfig:
    """Return the settings of an optimizer that draws z; the defaults for one that draws none."""
    return config if isinstance(config, PerturbationConfig) else ZerothOrderConfig()
