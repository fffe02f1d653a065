"""The methods, one file each: `step(params, loss_fn, state)`, explicit state, all through the same tests."""

from mezo_cli.optim.mezo import Mezo, StepResult

OPTIMIZERS = {"mezo": Mezo}

__all__ = ["OPTIMIZERS", "Mezo", "StepResult"]
