"""The settings of a `MezoOptimizer`, and which optimizer of the runner they choose."""

from typing import Any, Literal, cast

from mezo_cli.config.base import NotNegativeNumber, PositiveNumber, SettingError
from mezo_cli.config.explain import validate
from mezo_cli.config.optimizers import MomentDecay, Samples, SampleSchedule, SlowMomentDecay
from mezo_cli.config.schema import OptimizerConfig, Positive, Seed
from mezo_cli.optim import make_config, optimizer_class
from mezo_cli.optim.mezo import Mezo

METHOD = ("momentum", "betas", "sample_schedule", "total_steps")  # what MeZO itself has no need of

ALWAYS = ("eps", "samples", "seed")  # in a description
HIDDEN = ("name", "lr", "weight_decay", "schedule")  # the groups have their own


class StepSettings(OptimizerConfig):
    """What `MezoOptimizer` is given beside the model and the groups; its docstring says what each is."""

    eps: PositiveNumber = 1e-3
    weight_decay: NotNegativeNumber = 0.0
    momentum: MomentDecay = 0.0
    betas: tuple[MomentDecay, SlowMomentDecay] | None = None
    samples: Samples = 1
    sample_schedule: SampleSchedule = "constant"
    total_steps: Positive | None = None
    noise: Literal["gaussian", "rademacher"] = "gaussian"
    seed: Seed = 0

    @property
    def method(self) -> str:
        """The runner's name of the optimizer."""
        return "mezo_adam" if self.betas else "mezo_momentum" if self.momentum else "mezo"

    def make_optimizer(self) -> Mezo:
        """Return an optimizer of the runner; learning rate and weight decay are its groups'."""
        values = {name: getattr(self, name) for name in ("eps", "samples", "sample_schedule", "noise")}
        if self.betas:
            values |= {"beta1": self.betas[0], "beta2": self.betas[1]}
        elif self.momentum:
            values["momentum"] = self.momentum
        config = make_config(self.method, **values)
        return cast("type[Mezo]", optimizer_class(config))(config, self.seed, self.total_steps or 1)

    def method_settings(self) -> dict[str, Any]:
        """Return what a state dict and a trajectory say of the method, as JSON has it; empty for MeZO itself."""
        is_plain = self.method == "mezo" and self.sample_schedule == "constant"
        values = {name: getattr(self, name) for name in METHOD} | {"betas": self.betas and list(self.betas)}
        return {} if is_plain else values

    def describe(self) -> str:
        """Return the settings that are not at their defaults, and eps, samples and seed, in one line."""
        fields = type(self).model_fields.items()
        shown = [name for name, field in fields if name in ALWAYS or getattr(self, name) != field.default]
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown if name not in HIDDEN)


def check_settings(**values: Any) -> StepSettings:
    """Return the settings with Python's own numbers: NumPy's cannot be written as JSON."""
    try:
        settings = validate(StepSettings, {"name": "mezo", **values})
    except SettingError as error:
        if error.key != "betas":
            raise
        text = f"betas={values['betas']}: allowed are two numbers, from 0 to 0.9999 and from 0 to 0.999999"
        raise SettingError("betas", text) from error
    if settings.betas and settings.momentum:
        text = f"momentum={settings.momentum}: with betas the momentum is the first of them; leave momentum out"
        raise SettingError("momentum", text)
    if (settings.sample_schedule == "linear") != (settings.total_steps is not None):
        text = "total_steps is the length of sample_schedule='linear': give both or neither"
        raise SettingError("total_steps", text)
    return settings


def check_group(group: dict[str, Any]) -> None:
    """Check a group's own learning rate and weight decay, and make them Python's own numbers."""
    own: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay") if name in group}
    settings = validate(StepSettings, {"name": "mezo", **own}).model_dump()
    group |= {name: settings[name] for name in own}
