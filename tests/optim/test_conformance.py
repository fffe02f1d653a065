"""The conformance tests on every built-in optimizer that takes steps; none is missing from a command, page or test."""

import re
from typing import Any

import pytest

from mezo_cli.config import registry
from mezo_cli.config.choices import find_choices, plugin_dirs
from mezo_cli.config.explain import readers
from mezo_cli.config.registry import OPTIMIZERS
from mezo_cli.testing.optimizers import Conformance
from tests.command_line import error_line, mezo
from tests.doc_blocks import ROOT
from tests.optim.test_replayable import CASES
from tests.pairs.settings import VALUES

# What does not suit the defaults of Conformance.
LR = {
    "mezo_momentum": 0.005,
    "mezo_adam": 0.3,
    "adamw": 0.1,
    "es": 0.2,
    "fzoo": 0.2,
    "lozo": 0.01,
    "lozo_m": 0.01,
    "adamezo": 0.5,
}
ANCHORS: tuple[dict[str, Any], ...] = (
    {"baseline": "mean", "antithetic": True, "anchor": {"l2": 0.5}},
    {"shaping_std": "rows", "shaping": "std", "baseline": "theta", "anchor": {"l1": 0.5}},
)
MORE: dict[str, dict[str, Any]] = {
    # A V of rank 4 spans a part of the 6 dimensions, and a new one nearly ends the momentum.
    "lozo": {"outputs": 5, "steps": 300, "learning": {"interval": 2}},
    "lozo_m": {"outputs": 5, "steps": 300, "learning": {"interval": 10}},
    # Its steps do not shrink with the gradient.
    "adamezo": {"learning": {"schedule": "linear"}},
    # The control learns nothing.
    "null_signs": {"test_it_learns": None},
}
# Of each family of formulas one is ordinary: one direction, moments of its gradients, a population.
ORDINARY = ("mezo", "mezo_adam", "es")
VARIANTS = {
    "lozo": ({"rank": 2, "interval": 3},),
    "lozo_m": ({"rank": 2, "interval": 3},),
    "es": (*ANCHORS, {"shaping": "centered_rank"}, {"shaping": "sign", "baseline": "theta", "antithetic": True}),
    "fzoo": ANCHORS,
    "hizoo": ({"alpha": 0.02},),
    "hizoo_scalar": ({"alpha": 0.02},),
    "adamezo": ({"window": 3},),
}

for _name in OPTIMIZERS.built_in:
    if _name != "linear_probe":  # it takes no step
        _values: dict[str, Any] = {
            "name": _name,
            "lr": LR.get(_name, Conformance.lr),
            "variants": VARIANTS.get(_name, ()),
        }
        _suite = type(_name, (Conformance,), _values | MORE.get(_name, {}))
        globals()[f"Test{_name.title().replace('_', '')}"] = _suite if _name in ORDINARY else pytest.mark.slow(_suite)


OWN = {"lozo", "lozo_m", "hizoo", "hizoo_scalar", "adamezo"}
ALL = OWN | {"mezo", "mezo_momentum", "mezo_adam", "null_signs", "es", "fzoo", "adamw", "sgd", "linear_probe"}


def test_all_methods_are_seen_everywhere() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8").partition("| `optimizer=` |")[2]
    seen = {
        "table": {*OPTIMIZERS.built_in},
        "hints": {*readers("optimizer", "lr")},
        "completion": {*find_choices()["optimizer"]},
        "config.md": {*re.findall(r"`(\w+)`", page.splitlines()[0])},
        "pairs": {*VALUES["optimizer"]},
        "conformance": {getattr(suite, "name", "") for suite in globals().values()} & ALL | {"linear_probe"},
        "replay": {case.values[0][0].removeprefix("optimizer=") for case in CASES} | {"adamw", "sgd", "linear_probe"},
    }
    assert seen == dict.fromkeys(seen, ALL)
    assert not any("mezo_cli" in str(folder) for folder in plugin_dirs())


def test_an_installation_that_lacks_the_entry_points_says_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "plug_ins", lambda of_mezo: ())
    for name in ("targets", "built_in"):
        monkeypatch.delitem(vars(OPTIMIZERS), name, raising=False)
    for words in (["optimizer=lozo"], ["-m", "optimizer=mezo,hizoo"]):
        assert "; reinstall: pip install -e ." in error_line(mezo("train", "experiment=demo", *words))
