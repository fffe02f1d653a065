"""Patched forwards see theta + eps z and theta - eps z; theta itself is not written."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mezo_cli.objectives.collate import collate
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import PairedLinear, layer_norm_per_sign
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from tests.optim.test_mezo import SENTENCES, ready

Z = Direction(3, 11)


def perturb_in_place(stock: nn.Module, params: Params, c: float) -> None:
    """Add c z to every weight of an unpatched model."""
    with torch.no_grad():
        for name, p in stock.named_parameters():
            p += c * params.noise.z(Z, name, p.shape, "cpu").view(p.shape)


def test_theta_keeps_its_bits_also_after_an_error(roberta: Path) -> None:
    ours = ready(roberta)
    dense = ours.loaded.model.roberta.encoder.layer[0].output.dense
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    before = {name: p.clone() for name, p in ours.params.tensors.items()}
    with torch.no_grad(), ours.forward.perturbed(Z, 10.0, signs=(1,)):
        ours.objective.logits(batch)
    with torch.no_grad(), pytest.raises(RuntimeError), ours.forward.perturbed(Z, 10.0, signs=(1,)):
        dense(torch.zeros(1, 5))
    assert all(torch.equal(before[name], p) for name, p in ours.params.tensors.items())
    assert "weight" not in dense.__dict__
    assert dense.weight is ours.params.tensors["roberta.encoder.layer.0.output.dense.weight"]


class Outer(nn.Module):
    """A module that owns parameters and calls another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.scale * x) * self.scale


class ReadsOutside(Outer):
    """Weights read from outside their own module."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.outside.weight


class Routed(nn.Module):
    """One of three experts per batch, a module without effect, one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused, self.dead = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, 4]."""
        self.unused(x)
        return self.experts[int(x[0, 0])](x)


def test_with_one_expert_all_of_them_are_trained() -> None:
    model = Routed()
    forward = PerturbedForward(model, Params(model, make_noise("gaussian")))
    everything = forward.params.tensors
    left = forward.select_reachable(lambda: model(torch.zeros(1, 4)))
    assert left == ["unused.weight", "unused.bias", "dead.weight", "dead.bias"]
    assert list(forward.params.tensors) == [name for name in everything if name not in left]
    assert not forward.reach.outside


@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
def test_weights_read_outside_their_module_are_perturbed(noise: str) -> None:
    torch.manual_seed(1)
    model, stock = ReadsOutside(), ReadsOutside()
    stock.load_state_dict(model.state_dict())
    forward, x = PerturbedForward(model, Params(model, make_noise(noise))), torch.randn(2, 4)
    assert forward.select_reachable(lambda: model(x)) == ["outside.bias"]
    perturb_in_place(stock, forward.params, 0.5)
    with torch.no_grad(), forward.perturbed(Z, 0.5, signs=(1,)):
        torch.testing.assert_close(model(x), stock(x))


def test_bfloat16_rounds_the_perturbed_weights_and_keeps_theta_in_float32(roberta: Path) -> None:
    exact, rounded = ready(roberta), ready(roberta, "model.compute_dtype=bfloat16")
    batch = exact.objective.collate(exact.encoder.encode_all(SENTENCES))
    with torch.no_grad(), exact.forward.perturbed(Z, 0.01, signs=(1,)), rounded.forward.perturbed(Z, 0.01, signs=(1,)):
        a, b = exact.objective.logits(batch), rounded.objective.logits(batch)
    assert all(p.dtype == torch.float32 for p in rounded.params.tensors.values())
    assert 0 < (a - b).abs().max() < 0.2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("peft", ["none", "lora", "bias"])
def test_layers_that_are_perturbed_at_once_are_bitwise_identical(peft: str, dtype: str, roberta: Path) -> None:
    """As on a GPU, where a call per layer is made instead of one per module."""
    ours = ready(roberta, f"model.compute_dtype={dtype}", f"peft={peft}")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    ours.forward.select_reachable(lambda: ours.objective.logits(batch))
    found, calls = [], []
    for elements in (0, 1 << 25):
        ours.forward.patches.layer_elements = elements
        with mock.patch.object(ours.params.noise, "perturb", wraps=ours.params.noise.perturb) as perturb:
            for pairs in (True, False):
                with ours.forward.perturbed(Z, 0.05):
                    logits = partial(ours.objective.logits, batch)
                    found.append(logits() if pairs else ours.forward.forward_per_sign(logits))
        calls.append(perturb.call_count)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert calls[1] < calls[0] / 2
    ours.forward.patches.layer_elements = 100  # fewer than a layer has: its modules are perturbed one by one
    with ours.forward.perturbed(Z, 0.05):
        assert torch.equal(ours.objective.logits(batch), found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 16, 16), (7, 16, 3), (48, 64, 64), (130, 128, 512)])
def test_both_signs_at_once_have_the_bits_of_each(rows: int, width: int, out: int, dtype: torch.dtype) -> None:
    """A product of two rows by 16 x 16 alone has other bits than two products: there are two of them."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(2, n, width).to(dtype) for n in (rows, out, 1))
    norm, of_out = nn.LayerNorm(width), torch.randn(2, out).to(dtype)
    for both in (None, of_out):
        apart = [F.linear(x[i], weight[i], None if both is None else both[i]) for i in range(2)]
        assert torch.equal(PairedLinear(weight, both)(x), torch.stack(apart))
    apart = [F.layer_norm(x[i], (width,), weight[i, 0], bias[i, 0], norm.eps) for i in range(2)]
    assert torch.equal(layer_norm_per_sign(norm, weight[:, :1], bias, x), torch.stack(apart))


def test_a_forward_with_both_signs_that_is_neither_paired_nor_per_sign_is_refused(roberta: Path) -> None:
    ours = ready(roberta)
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    with ours.forward.perturbed(Z, 0.05), pytest.raises(RuntimeError, match="both signs"):
        ours.loaded.model(**collate(batch.rows, ours.loaded).layout)


@pytest.mark.parametrize("noise", ["gaussian", "rademacher", "torch"])
def test_both_signs_of_a_module_that_owns_parameters_and_calls_another(noise: str) -> None:
    torch.manual_seed(1)
    model = Outer()
    forward, x = PerturbedForward(model, Params(model, make_noise(noise))), torch.randn(1, 3, 4)
    forward.select_reachable(lambda: model(x))
    with forward.perturbed(Z, 0.5):
        per_sign = forward.forward_per_sign(lambda: model(x))
        with forward.paired_forward():
            paired = model(x.repeat(2, 1, 1))
    torch.testing.assert_close(paired, per_sign.flatten(0, 1))
    with torch.no_grad():
        perturb_in_place(model, forward.params, -0.5)
        torch.testing.assert_close(paired[1:], model(x))
