"""optimizer=linear_probe: a run of zero steps, whose model `init=linear_probe` has fitted before the first.

The name tells such runs apart in run directories and tables. conf/optimizer/linear_probe.yaml sets `init` and `steps`.
"""

from mezo_cli.config.optimizers import ZerothOrderConfig
from mezo_cli.config.schema import OptimizerConfig
from mezo_cli.optim.mezo import Mezo


class LinearProbe(Mezo):
    """MeZO of zero steps: it has no settings of its own, runs no forward and updates nothing."""

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None:
        super().__init__(ZerothOrderConfig(name=config.name, lr=config.lr), seed, steps)
