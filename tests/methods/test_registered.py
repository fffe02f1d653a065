"""Methods that entry points of mezo's own register are built in: none vanishes from a command, a page or a test."""

import re

import pytest

from mezo_cli.config import registry
from mezo_cli.config.choices import find_choices, plugin_dirs
from mezo_cli.config.explain import readers
from mezo_cli.config.registry import OPTIMIZERS
from tests.command_line import error_line, mezo
from tests.doc_blocks import ROOT
from tests.optim import test_conformance
from tests.optim.test_replayable import CASES
from tests.pairs.settings import VALUES

OWN = {"lozo", "lozo_m", "hizoo", "hizoo_scalar", "adamezo"}
ALL = OWN | {"mezo", "mezo_momentum", "mezo_adam", "null_signs", "es", "fzoo", "adamw", "sgd", "linear_probe"}


def test_all_methods_are_seen_everywhere() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8").partition("| `optimizer=` |")[2]
    suites = vars(test_conformance).values()
    seen = {
        "table": {*OPTIMIZERS.built_in},
        "hints": {*readers("optimizer", "lr")},
        "completion": {*find_choices()["optimizer"]},
        "config.md": {*re.findall(r"`(\w+)`", page.splitlines()[0])},
        "pairs": {*VALUES["optimizer"]},
        "conformance": {getattr(suite, "name", "") for suite in suites} & ALL | {"linear_probe"},
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
