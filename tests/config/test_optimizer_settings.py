"""The `optimizer` group: the settings of all built-in optimizers, then those of the chosen plug-in."""

import copy
import pickle
from pathlib import Path

import pytest
import yaml

from mezo_cli.config.compose import build_config
from mezo_cli.config.keys import all_keys
from mezo_cli.config.schema import Setting, to_dict
from mezo_cli.config.stored import read_config, to_yaml
from mezo_cli.config.validation import build
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.optim.mezo import Mezo

ORDER = ["name", "lr", "eps", "weight_decay", "samples", "sample_schedule", "noise", "schedule", "momentum", "beta1"]
ORDER += ["beta2", "adam_eps", "window", "max_grad_norm", "dropout"]


class Clipped(Mezo):
    settings = (*Mezo.settings, Setting("clip", float, 2.0, "bound of g", above=0.0))


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plug-ins are installed: one of them cannot be imported."""
    added = {"clipped": f"{__name__}:Clipped", "broken": "no_such_package:Optimizer"}
    monkeypatch.setitem(vars(OPTIMIZERS), "targets", {**OPTIMIZERS.targets, **added})


def plain(**values: object) -> dict[str, object]:
    """The default config as plain values, with another optimizer."""
    return {**to_dict(build_config(["data=demo"])), "optimizer": values}


def test_config_yaml_lists_the_settings_of_all_built_in_optimizers_in_order() -> None:
    for name in OPTIMIZERS.built_in:
        words = [f"optimizer={name}", "data=demo"]
        assert list(yaml.safe_load(to_yaml(build_config(words)))["optimizer"]) == ORDER


def test_a_setting_is_an_attribute_and_survives_a_copy() -> None:
    made = make_config("sgd", momentum=0.5)
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (one.name, one.momentum, one.lr) == ("sgd", 0.5, 1e-6)
        assert not hasattr(one, "nosuch")


@pytest.mark.usefixtures("plugins")
def test_a_plug_ins_own_setting_comes_last_is_checked_and_is_read_back(tmp_path: Path) -> None:
    config = build(plain(name="clipped", clip=3))
    assert config.optimizer.clip == 3.0
    assert build(plain(name="clipped")).optimizer.clip == 2.0
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert list(yaml.safe_load(to_yaml(config))["optimizer"]) == [*ORDER, "clip"]
    assert read_config(tmp_path / "config.yaml") == config
    assert "optimizer.clip" in all_keys()
    with pytest.raises(UserError, match=r"optimizer.clip=0: out of range, allowed is a finite number above 0"):
        build(plain(name="clipped", clip=0))
    with pytest.raises(UserError, match=r"optimizer.clip=3: optimizer=mezo does not read it; it reads lr, eps"):
        build(plain(name="mezo", clip=3))
    with pytest.raises(UserError, match=r"optimizer.momentum=0.5: optimizer=clipped does not read it"):
        build(plain(name="clipped", momentum=0.5))
    with pytest.raises(UserError, match=r"unknown key 'optimizer.clp' \(did you mean 'optimizer.clip'\?\)"):
        build(plain(name="clipped", clp=3))


@pytest.mark.usefixtures("plugins")
def test_a_broken_plug_in_is_reported_when_it_is_chosen() -> None:
    assert build(plain(name="mezo")).optimizer.name == "mezo"
    with pytest.raises(UserError, match=r"optimizer=broken: the plug-in no_such_package:Optimizer cannot be imported"):
        build(plain(name="broken"))
