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


def test_tensors_are_the_trainable_ones_in_the_order_of_the_model() -> None:
    params = Params(model(), make_noise("gaussian"))
    assert list(params.tensors) == ["0.weight", "1.weight", "1.bias"]
    assert params.count == 300 * 700 + 700 * 5 + 5


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


def test_tensors_are_views_of_flat_storage_and_look_like_tensors_of_their_own() -> None:
    layers = model()
    before = {name: p.detach().clone() for name, p in layers.named_parameters()}
    params = Params(layers, make_noise("gaussian"))
    assert all(torch.equal(p, before[name]) for name, p in layers.named_parameters())
    (left, right) = params.spans(params.tensors)[:1], params.spans(["0.weight", "1.bias"])
    assert [piece.name for piece in left[0].pieces] == list(params.tensors)
    assert [[piece.name for piece in span.pieces] for span in right] == [["0.weight"], ["1.bias"]]
    for name, p in params.tensors.items():
        assert p.data_ptr() == params.span_of[name].theta.data_ptr()
        assert p.untyped_storage().nbytes() == p.nbytes  # what transformers and safetensors look at when they save
        p.data.add_(1)
        assert torch.equal(params.span_of[name].theta[: p.numel()], (before[name] + 1).view(-1))


def test_a_large_tensor_stays_where_it_is_and_a_module_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezo_cli.perturb.params.SEGMENT", 1 << 13)
    layers = nn.ModuleDict({"table": nn.Embedding(64, 256), **{f"l{i}": nn.Linear(64, 50) for i in range(3)}})
    address = layers["table"].weight.data_ptr()
    params = Params(layers, make_noise("gaussian"))
    assert layers["table"].weight.data_ptr() == address
    segments = [[name for name, _ in span.segment.tensors] for span in params.spans(params.tensors)]
    assert segments == [["table.weight"], ["l0.weight", "l0.bias", "l1.weight", "l1.bias"], ["l2.weight", "l2.bias"]]


def test_saved_weights_take_no_copy_of_the_model(
    roberta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = AutoModelForMaskedLM.from_pretrained(roberta)
    Params(stock, make_noise("gaussian"))
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("a tensor was copied"))
    stock.save_pretrained(tmp_path)
    monkeypatch.undo()
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in stock.state_dict().items())
