"""The methods, one file each, all through the same tests (tests/optim). `schema.METHODS` tells what each reads."""

from mezo_cli.optim.linear_probe import LinearProbe
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.step import LossFn, Optimizer, StepResult, not_finite

OPTIMIZERS: dict[str, type[Optimizer]] = {"mezo": Mezo, "linear_probe": LinearProbe}

__all__ = ["OPTIMIZERS", "LinearProbe", "LossFn", "Mezo", "Optimizer", "StepResult", "not_finite"]
