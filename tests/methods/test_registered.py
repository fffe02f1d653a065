"""Methods that entry points of mezo's own register are built in: none vanishes from a command, a page or a test."""

import re

import pytest

from mezo_cli.config import registry
from mezo_cli.config.choices import find_choices, plugin_dirs
from mezo_cli.config.explain import key_owners, readers
from mezo_cli.config.registry import OPTIMIZERS
from tests.command_line import error_line, mezo
from tests.doc_blocks import ROOT
from tests.optim import test_conformance, test_replayable
from tests.pairs.settings import VALUES

OWN = {"lozo", "lozo_m", "hizoo", "hizoo_scalar", "adamezo"}
IN_OPTIM = {"mezo", "mezo_momentum", "mezo_adam", "null_signs", "es", "fzoo"}
ALL = OWN | IN_OPTIM | {"adamw", "sgd", "linear_probe"}


def test_all_methods_are_seen_everywhere() -> None:
    suites = {getattr(suite, "name", "") for suite in vars(test_conformance).values()}
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    seen = {
        "table": {*OPTIMIZERS.built_in},
        "pairs": {*VALUES["optimizer"]},
        "conformance": suites & ALL | {"linear_probe"},  # which takes no step
        "hints": {*readers("optimizer", "lr")},
        "completion": {*find_choices()["optimizer"]},
        "config.md": {*re.findall(r"`(\w+)`", page.partition("| `optimizer=` |")[2].splitlines()[0])},
    }
    assert seen == dict.fromkeys(seen, ALL)
    replayed = {case.values[0][0].removeprefix("optimizer=") for case in test_replayable.CASES}
    assert replayed == OWN | IN_OPTIM
    assert {"optimizer.rank", "optimizer.alpha", "optimizer.window"} <= key_owners().keys()
    assert not any("mezo_cli" in str(folder) for folder in plugin_dirs())


def test_an_installation_that_lacks_the_entry_points_says_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "plug_ins", lambda: ())
    for name in ("targets", "built_in"):
        monkeypatch.delitem(vars(OPTIMIZERS), name, raising=False)
    for words in (["optimizer=lozo"], ["-m", "optimizer=mezo,hizoo"]):
        assert "; reinstall: pip install -e ." in error_line(mezo("train", "experiment=demo", *words))
