"""Patched forwards see theta + eps z and theta - eps z, and so does a member's own copy; theta is not written."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mezo_cli.adapters.adapter import attach
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import ModelConfig
from mezo_cli.models import CAUSAL_LM, load
from mezo_cli.objectives.collate import collate
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import PairedLinear, layer_norm_per_sign
from mezo_cli.perturb.members import Population
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from tests import tiny
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


IDS = torch.tensor([[5, 17, 33, 21], [9, 8, 7, 6]])


def patched(folder: Path, peft: str = "none", theta: str = "float32", compute: str = "float32") -> tuple[Any, Any]:
    """Return a model and its patched forwards."""
    config = build_config([f"model.path={folder}", "model.name=tiny", "data=demo", "objective=lm", f"peft={peft}"])
    settings = ModelConfig(name="tiny", path=str(folder), dtype=theta, compute_dtype=compute, device="cpu")
    loaded = load(settings, CAUSAL_LM, [], seed=1)
    attach(loaded, config.peft, settings, seed=1)
    forward = PerturbedForward(loaded.model, Params(loaded.model, make_noise("gaussian")))
    forward.select_reachable(lambda: loaded.model(IDS).logits)
    forward.set_compute_dtype(loaded.compute_dtype)
    return loaded.model, forward


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.decoder(tmp_path_factory.mktemp(request.param), request.param, tied=request.param == "gpt2")


@pytest.mark.sample(8)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("theta", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("peft", ["none", "lora", "prefix", "bias", "head"])
def test_logits_have_the_bits_of_patched_forwards(peft: str, theta: str, compute: str, folder: Path) -> None:
    if peft == "bias" and "llama" in folder.name:
        pytest.skip("Llama has no biases")
    model, forward = patched(folder, peft, theta, compute)
    population = Population(forward)
    before = {name: p.clone() for name, p in forward.params.tensors.items()}
    memory = {name: p.data_ptr() for name, p in model.named_parameters()}
    with torch.no_grad():
        for sign in (1, -1):
            with forward.perturbed(Z, 0.05, (sign,)):
                expected = model(IDS).logits
                with population.materialized():
                    logits = model(IDS).logits
                assert torch.equal(model(IDS).logits, expected)
            assert torch.equal(logits, expected)
            assert logits.dtype == expected.dtype == getattr(torch, compute)
        with population.materialized():
            at_theta = model(IDS).logits
        assert torch.equal(at_theta, model(IDS).logits)
        assert not torch.equal(at_theta, expected)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == memory
    assert all(
        torch.equal(before[name], p) and p.dtype == before[name].dtype for name, p in forward.params.tensors.items()
    )


def test_members_share_a_batch_only_where_matrices_alone_are_trained(folder: Path) -> None:
    forwards = {peft: patched(folder, peft)[1] for peft in ("none", "lora", "prefix", "head")}
    supported = {peft: Population(forward).can_share_batches for peft, forward in forwards.items()}
    assert supported == {"none": False, "lora": True, "prefix": False, "head": True}


def test_weights_that_are_read_outside_their_module_are_those_of_the_member() -> None:
    torch.manual_seed(1)
    model, x = ReadsOutside(), torch.randn(2, 4)
    forward = PerturbedForward(model, Params(model, make_noise("gaussian")))
    population = Population(forward)
    forward.select_reachable(lambda: model(x))
    with forward.perturbed(Z, 0.5, (1,)):
        expected = model(x)
        with population.materialized():
            assert torch.equal(model(x), expected)
    assert not torch.equal(model(x), expected)


def test_theta_and_the_patches_are_back_after_an_error(folder: Path) -> None:
    model, forward = patched(folder)
    population = Population(forward)
    memory = {name: p.data_ptr() for name, p in model.named_parameters()}
    expected = model(IDS).logits
    with forward.perturbed(Z, 0.05, (1,)):
        with pytest.raises(ValueError, match="stopped"), population.materialized():
            raise ValueError("stopped")
        with pytest.raises(IndexError), population.materialized():
            model(torch.tensor([[10**6]]))
        perturbed = model(IDS).logits
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == memory
    assert torch.equal(model(IDS).logits, expected)
    assert not torch.equal(perturbed, expected)
