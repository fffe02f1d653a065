"""The trainable tensors: their selection, update and storage, and how few spans an update goes over."""

import mmap
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.perturb.params import Params


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 5))
    layers[0].bias.requires_grad_(False)
    return layers


def test_what_is_not_in_the_graph_is_not_selected() -> None:
    layers = model()
    params = Params(layers, make_noise("gaussian"))
    assert params.select_reachable(layers[1](torch.ones(700))) == ["0.weight"]
    assert list(params.tensors) == ["1.weight", "1.bias"]
    with pytest.raises(UserError, match="nothing to train"):
        params.select_reachable(layers[0](torch.ones(1, 300)))


def test_a_weak_decay_is_taken_in_float64_and_rounded_once_with_the_step() -> None:
    """In float32 1 - 2e-8 is 1."""
    params, step = Params(model(), make_noise("gaussian")), torch.randn(700 * 300)
    theta = params.span_of["0.weight"].theta[: len(step)]
    want = ((1 - 2e-8) * theta.double() - step.double()).float()
    params.decay_and_subtract(theta, step, 1 - 2e-8)
    assert torch.equal(theta, want)


def test_saving_takes_no_copy_of_the_model(roberta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = AutoModelForMaskedLM.from_pretrained(roberta)
    Params(stock, make_noise("gaussian"))
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("a tensor was copied"))
    stock.save_pretrained(tmp_path)
    monkeypatch.undo()
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in stock.state_dict().items())


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.usefixtures("released_pages")
def test_the_pages_of_a_mapped_checkpoint_are_released(tmp_path: Path) -> None:
    """One tensor that stays mapped would keep the memory of the whole file."""
    path, half = tmp_path / "weights.bin", 1 << 20
    path.write_bytes(bytes(8 * half))
    mapped = torch.from_file(str(path), shared=False, size=2 * half, dtype=torch.float32)
    mapped += torch.arange(2 * half)  # written pages belong to the process
    module = nn.ParameterDict({"a": nn.Parameter(mapped[:half]), "b": nn.Parameter(mapped[half:])})

    def resident() -> int:
        smaps = Path("/proc/self/smaps").read_text(encoding="utf-8").partition(str(path))[2]
        return 1024 * int(next(line for line in smaps.splitlines() if line.startswith("Rss:")).split()[1])

    assert resident() == 8 * half
    Params(module, make_noise("gaussian"))
    assert torch.equal(torch.cat(list(module.values())), torch.arange(2.0 * half))
    assert resident() <= 3 * mmap.PAGESIZE
    assert path.read_bytes() == bytes(8 * half)


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LARGE |= {"vocab_size": 50265, "max_position_embeddings": 514}


def test_a_layer_is_perturbed_by_one_launch_for_both_signs() -> None:
    with torch.device("meta"):
        model = RobertaForMaskedLM(RobertaConfig(**LARGE)).eval()
        states = torch.empty(2, 32, 1024)
    forward = PerturbedForward(model, Params(model, make_noise("gaussian")))
    counted = mock.patch.object(Kernel, "__call__")
    with counted as kernel, forward.perturbed(Direction(1, 0), 1e-3), forward.paired_forward():
        model.roberta.encoder(states)
    assert kernel.call_count == LARGE["num_hidden_layers"]


@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
@pytest.mark.parametrize("optimizer", ["mezo", "mezo in half precision", "mezo_momentum", "mezo_adam"])
def test_the_update_of_roberta_large_goes_over_few_spans(optimizer: str, noise: str) -> None:
    """Counted on the device `meta`, where tensors have no memory: only on a CPU are there more spans."""
    with torch.device("meta"):
        model = RobertaForMaskedLM(RobertaConfig(**LARGE))
    if "half precision" in optimizer:
        model.bfloat16()
    params, config = Params(model, make_noise(noise)), make_config(optimizer.split()[0], noise=noise)
    method = OPTIMIZERS.implementation(config.name)(config, 0, 9)
    with mock.patch.object(Kernel, "__call__") as kernel, torch.no_grad():
        method.apply_updates(params, [(0, [1.0], 1e-6)])
    assert 10 <= kernel.call_count <= 30
