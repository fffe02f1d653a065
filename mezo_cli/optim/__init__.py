"""The optimizers: the table of names, and what each class declares (settings, display name, trajectory, backward).

Nothing here imports torch: the command line reads these declarations before it loads a model.
"""

from typing import Any

from mezo_cli.config.registry import Registry
from mezo_cli.config.schema import OptimizerConfig, Setting
from mezo_cli.optim.base import LossFn, Optimizer, ReplayableOptimizer, StatefulOptimizer, StepResult, not_finite
from mezo_cli.optim.settings import SHARED

OPTIMIZERS = Registry(
    "optimizer",
    {
        "mezo": "mezo_cli.optim.mezo:Mezo",
        "mezo_momentum": "mezo_cli.optim.mezo_momentum:MezoMomentum",
        "mezo_adam": "mezo_cli.optim.mezo_adam:MezoAdam",
        "adamw": "mezo_cli.optim.first_order:AdamW",
        "sgd": "mezo_cli.optim.first_order:Sgd",
        "linear_probe": "mezo_cli.optim.linear_probe:LinearProbe",
    },
    "mezo.optimizers",
)

__all__ = [
    "OPTIMIZERS",
    "LossFn",
    "Optimizer",
    "ReplayableOptimizer",
    "StatefulOptimizer",
    "StepResult",
    "all_settings",
    "make_config",
    "not_finite",
    "optimizer_class",
]


def optimizer_class(config: OptimizerConfig) -> type[Optimizer]:
    """Return the class of the chosen optimizer; its class attributes say what it reads and needs."""
    return OPTIMIZERS.load(config.name)


def all_settings(name: str | None = None) -> dict[str, Setting]:
    """Return the settings that config.yaml lists under `optimizer`, by name, in its order.

    These are the settings of all built-in optimizers and then, if `name` is a plug-in, its own.
    """
    found = {setting.name: setting for setting in SHARED}
    for one in [*OPTIMIZERS.built_in, *([name] if name else [])]:
        for setting in OPTIMIZERS.load(one).settings:
            if one == name or setting.name not in found:  # the chosen optimizer may narrow a range
                found[setting.name] = setting
    return found


def make_config(name: str, **values: Any) -> OptimizerConfig:
    """Return the config of an optimizer: the defaults of its settings, changed by `values`. Nothing is checked."""
    return OptimizerConfig(name, {key: setting.default for key, setting in all_settings(name).items()} | values)
