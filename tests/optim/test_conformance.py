"""The conformance tests of mezo_cli.testing.optimizers, run on every built-in optimizer that takes steps."""

from mezo_cli.optim import OPTIMIZERS
from mezo_cli.testing.optimizers import Conformance

LR = {"mezo_momentum": 0.005, "mezo_adam": 0.3, "adamw": 0.1}  # where the default of Conformance does not suit

for _name in OPTIMIZERS.built_in:
    if _name != "linear_probe":  # it takes no step
        _values = {"name": _name, "lr": LR.get(_name, Conformance.lr)}
        globals()[f"Test{_name.title().replace('_', '')}"] = type(_name, (Conformance,), _values)
