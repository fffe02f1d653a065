"""optimizer=linear_probe: a run of zero steps, whose model `init=linear_probe` has fitted before the first.

The name tells such runs apart in run directories and tables. conf/optimizer/linear_probe.yaml sets `init` and `steps`.
"""

from mezo_cli.optim.mezo import Mezo


class LinearProbe(Mezo):
    """MeZO of zero steps: it reads no settings, runs no forward and updates nothing."""

    title = "LP"
    settings = ()
