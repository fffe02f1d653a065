"""Linear probing has no step: all of it is done to the start (`init=linear_probe`, in `probing.py`).

It stands in the table of methods so that such a run is named, listed and compared as what it is.
"""

from mezo_cli.optim.step import LossFn, StepResult
from mezo_cli.params import Params
from mezo_cli.schema import OptimizerConfig


class LinearProbe:
    """The method of no steps; `checks` refuses a config that asks it for one."""

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None:
        assert steps == 0

    def step(self, params: Params, loss_fn: LossFn, step: int) -> StepResult:
        """Never called."""
        raise AssertionError("linear probing takes no step")

    def passes(self, steps: int) -> dict[str, int]:
        """None: the probe's own forwards are told beside it."""
        return {"forwards": 0, "backwards": 0}

    def apply(self, params: Params, records: list[tuple[int, list[float], float]]) -> None:
        """Do the updates of no records."""
        assert not records
