"""The methods, one file each, all through the same tests (tests/optim). `schema.METHODS` tells what each reads."""

from mezo_cli.optim.first_order import AdamW, FirstOrder, Sgd
from mezo_cli.optim.linear_probe import LinearProbe
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.mezo_adam import MezoAdam
from mezo_cli.optim.mezo_momentum import MezoMomentum
from mezo_cli.optim.step import LossFn, Optimizer, StepResult, not_finite

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "mezo": Mezo,
    "mezo_momentum": MezoMomentum,
    "mezo_adam": MezoAdam,
    "adamw": AdamW,
    "sgd": Sgd,
    "linear_probe": LinearProbe,
}

__all__ = ["OPTIMIZERS", "FirstOrder", "LinearProbe", "LossFn", "Mezo", "Optimizer", "StepResult", "not_finite"]
