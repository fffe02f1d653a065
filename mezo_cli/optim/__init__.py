"""The built-in optimizers: estimates of the gradient (mezo.py, es.py) and updates (update.py), and backpropagation.

Nothing here imports torch: the command line reads what the classes declare before it loads a model.
"""

from typing import Any

from mezo_cli.config.registry import OPTIMIZERS
from mezo_cli.optim.base import (
    LossFn,
    Optimizer,
    ReplayableOptimizer,
    RowLossFn,
    StatefulOptimizer,
    StepResult,
    not_finite,
)


def make_config(name: str, **values: Any) -> Any:
    """Return the settings of an optimizer: the defaults of its class, changed by `values`. Nothing is checked."""
    return OPTIMIZERS.load(name).model_construct(name=name, **values)
