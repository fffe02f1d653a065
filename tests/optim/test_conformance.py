"""The conformance tests of mezo_cli.testing.optimizers, run on every built-in optimizer that takes steps."""

from typing import Any

import pytest

from mezo_cli.optim import OPTIMIZERS
from mezo_cli.testing.optimizers import Conformance

# What does not suit the defaults of Conformance.
LR = {"mezo_momentum": 0.005, "mezo_adam": 0.3, "adamw": 0.1, "es": 0.2, "fzoo": 0.2}
ANCHORS: tuple[dict[str, Any], ...] = (
    {"baseline": "mean", "antithetic": True, "anchor": {"l2": 0.5}},
    {"shaping_std": "rows", "shaping": "std", "baseline": "theta", "anchor": {"l1": 0.5}},
)
VARIANTS = {
    "es": (*ANCHORS, {"shaping": "centered_rank"}, {"shaping": "sign", "baseline": "theta", "antithetic": True}),
    "fzoo": ANCHORS,
}

for _name in OPTIMIZERS.built_in:
    if _name != "linear_probe":  # it takes no step
        _values = {"name": _name, "lr": LR.get(_name, Conformance.lr), "variants": VARIANTS.get(_name, ())}
        _suite = type(_name, (Conformance,), _values)
        # fzoo is es with other settings.
        globals()[f"Test{_name.title().replace('_', '')}"] = pytest.mark.slow(_suite) if _name == "fzoo" else _suite
