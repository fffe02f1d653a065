"""The trainable tensors: their selection, their update, and their blocks."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM

from mezo_cli.errors import UserError
from mezo_cli.perturb.noise import make_noise
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
