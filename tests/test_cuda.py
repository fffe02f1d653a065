"""Conformance tests and the steps of device_cases.py on a GPU: `pytest -m cuda`. Every other test sees none."""

from pathlib import Path

import pytest
import torch

from mezo_cli.testing import objectives, optimizers
from tests import tiny
from tests.device_cases import CASES, case_config, check_case, take_steps

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and `pytest -m cuda`", allow_module_level=True)

pytestmark = pytest.mark.cuda

LR = {"mezo": 0.05, "mezo_momentum": 0.005, "mezo_adam": 0.3, "adamw": 0.1, "sgd": 0.05}
for _name, _lr in LR.items():
    _suite = type(_name, (optimizers.Conformance,), {"name": _name, "lr": _lr, "device": "cuda"})
    globals()[f"Test{_name}"] = _suite
for _name in ("mlm", "cls"):
    globals()[f"Test{_name}"] = type(_name, (objectives.Conformance,), {"name": _name, "device": "cuda"})


class TestLm(objectives.Conformance):
    name = "lm"
    device = "cuda"

    @pytest.fixture
    def settings(self, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        return [f"model.path={tiny.decoder(tmp_path_factory.mktemp('gpt2'))}"]


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_device_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")  # nothing is compiled while operations are counted
    hosts = take_steps(case_config(name, tmp_path, "cuda"))
    check_case(name, {what: vars(host) for what, host in hosts.items()})
