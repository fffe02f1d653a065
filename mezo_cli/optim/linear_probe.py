"""optimizer=linear_probe: a run of zero steps, whose model `init=linear_probe` has fitted before the first.

The name tells such runs apart in run directories and tables. conf/optimizer/linear_probe.yaml sets `init` and `steps`.
"""

from typing import Any

from mezo_cli.config.schema import OptimizerConfig
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.settings import ZerothOrderConfig


class LinearProbe(Mezo):
    """MeZO of zero steps: it has no settings of its own, runs no forward and updates nothing."""

    title = "LP"
    settings = OptimizerConfig

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None:
        super().__init__(ZerothOrderConfig(name=config.name, lr=config.lr), seed, steps)

    @classmethod
    def check(cls, config: Any) -> None:
        """Reject nothing: there is nothing to set."""

    def count_forwards(self, steps: int) -> dict[str, int]:
        """Return none; summary.json adds the forwards of the fit itself."""
        return {"forwards": 0, "backwards": 0}
