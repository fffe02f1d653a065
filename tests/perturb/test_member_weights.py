"""A member's weights that are made once have the bits that patched forwards see; theta is only read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.adapters.adapter import attach
from mezo_cli.config.schema import ModelConfig
from mezo_cli.models import CAUSAL_LM, load
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.members import Population
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from tests import tiny
from tests.optim.test_mezo import build_config
from tests.perturb.test_forward import ReadsOutside

Z = Direction(3, 11)
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
