"""The conformance tests of mezo_cli.testing.optimizers, run on every built-in optimizer that takes steps."""

from typing import Any

import pytest

from mezo_cli.optim import OPTIMIZERS
from mezo_cli.testing.optimizers import Conformance

# What does not suit the defaults of Conformance.
LR = {"mezo_momentum": 0.005, "mezo_adam": 0.3, "adamw": 0.1, "es": 0.2, "fzoo": 0.2, "lozo": 0.01}
ANCHORS: tuple[dict[str, Any], ...] = (
    {"baseline": "mean", "antithetic": True, "anchor": {"l2": 0.5}},
    {"shaping_std": "rows", "shaping": "std", "baseline": "theta", "anchor": {"l1": 0.5}},
)
LEARNING = {"lozo": {"interval": 2}}  # a V of rank 4 spans a part of the 6 dimensions
VARIANTS = {
    "lozo": ({"rank": 2, "interval": 3}, {"rank": 2, "interval": 2, "as_released": True}),
    "es": (*ANCHORS, {"shaping": "centered_rank"}, {"shaping": "sign", "baseline": "theta", "antithetic": True}),
    "fzoo": ANCHORS,
}

for _name in OPTIMIZERS.built_in:
    if _name != "linear_probe":  # it takes no step
        _values: dict[str, Any] = {
            "name": _name,
            "lr": LR.get(_name, Conformance.lr),
            "variants": VARIANTS.get(_name, ()),
        }
        if _name in LEARNING:
            _values |= {"outputs": 5, "learning": LEARNING[_name], "steps": 300}
        if _name == "null_signs":  # the control: it learns nothing
            _values["test_it_learns"] = None
        _suite = type(_name, (Conformance,), _values)
        # fzoo is es with other settings.
        globals()[f"Test{_name.title().replace('_', '')}"] = pytest.mark.slow(_suite) if _name == "fzoo" else _suite
