"""optimizer=linear_probe: a run of zero steps, whose model `init=linear_probe` has fitted before the first.

The name tells such runs apart in run directories and tables. conf/optimizer/linear_probe.yaml sets `init` and `steps`.
"""

from mezo_cli.config.schema import OptimizerConfig
from mezo_cli.optim.mezo import Mezo


class LinearProbe(Mezo):
    """MeZO of zero steps: it has no settings of its own, runs no forward and updates nothing."""

    title = "LP"
    settings = OptimizerConfig

    def count_forwards(self, steps: int) -> dict[str, int]:
        """Return none; summary.json adds the forwards of the fit itself."""
        return {"forwards": 0, "backwards": 0}
