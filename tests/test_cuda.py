"""Conformance tests and the steps of device_cases.py on a GPU: `pytest -m cuda`. Every other test sees none."""

from pathlib import Path

import pytest
import torch

from mezo_cli.perturb.noise import simd
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.testing import objectives, optimizers
from tests import tiny
from tests.device_cases import CASES, case_config, check_case, take_steps
from tests.perturb.test_simd import cases, theta_of

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


@pytest.mark.parametrize(
    ("case", "kernel", "inputs"), cases(), ids=lambda value: str(value) if type(value) is tuple else ""
)
def test_every_noise_kernel_gives_the_bits_of_the_tensor_operations(
    case: tuple[int, ...], kernel: Kernel, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, stored, out, arrays, _ = case
    theta, ended = theta_of(stored, 3 * kernel.tile), []
    for eager, device in (("1", "cpu"), ("1", "cuda"), ("0", "cuda")):
        monkeypatch.setenv("MEZO_EAGER", eager)
        outs = [torch.zeros(len(theta), dtype=simd.TYPES[out]) for _ in range(1, arrays)]
        given = [array.clone().to(device) for array in (theta, *outs)]
        kernel(*given, *(value.to(device) for value in inputs))
        ended.append([array.cpu() for array in given])
    assert Kernel.compiler_error is None
    assert all(map(torch.equal, ended[1], ended[0]))
    assert all(map(torch.equal, ended[2], ended[0]))


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_device_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")  # nothing is compiled while operations are counted
    hosts = take_steps(case_config(name, tmp_path, "cuda"))
    check_case(name, {what: vars(host) for what, host in hosts.items()})
