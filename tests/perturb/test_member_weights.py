"""A member's weights that are made once have the bits that patched forwards see; theta is only read."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.adapters.adapter import attach
from mezo_cli.config.schema import ModelConfig
from mezo_cli.models import CAUSAL_LM, load, load_tokenizer
from mezo_cli.objectives.decoding import Decoder, Sampling
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.members import Population
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.perturb.plan import Perturbation
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_members_of_a_lora_that_share_a_batch_say_what_each_says_alone(temperature: float, folder: Path) -> None:
    """Prompts of two lengths and samples, and an end token that leaves members with different numbers of rows."""
    model, forward = patched(folder, "lora")
    population = Population(forward)
    prompts = [[5, 17, 33, 21], [5, 17, 33, 21], [9, 8, 7, 6], [40, 41], [12] * 60]
    keys = [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    sampling = Sampling(12, temperature, (), False, seed=7)
    members = [Perturbation(Direction(1, 0, 0), 2.0, (1,)), Perturbation(Direction(1, 0, 0), 2.0, (-1,)), None]
    tokenizer = load_tokenizer(ModelConfig(name="tiny", path=str(folder)), CAUSAL_LM)
    decoder = Decoder(model, tokenizer)

    def complete(member: Perturbation | None) -> list[list[int]]:
        with nullcontext() if member is None else forward.perturbed(*member), population.materialized():
            return [c.ids for c in decoder.complete(prompts, keys, sampling)]

    free = [complete(member) for member in members]
    model.generation_config.eos_token_id = free[0][2][3]  # ends a row of the first member early
    decoder = Decoder(model, tokenizer)
    apart = [complete(member) for member in members]
    assert len({len(ids) for of_member in apart for ids in of_member}) > 1
    assert apart[0] != apart[1] != apart[2] != apart[0]
    expected = model(IDS).logits
    assert population.can_share_batches
    with population.materialized(members) as rows:
        together = [c.ids for c in decoder.complete(prompts, keys, sampling, rows)]
        assert rows is not None
        rows.set([0, 1, 1], torch.device("cpu"))
        logits = model(torch.cat([IDS, IDS[1:]])).logits
    assert together == [ids for of_member in apart for ids in of_member]
    for member, row, token_ids in ((0, 0, IDS[0]), (1, 1, IDS[1])):
        with forward.perturbed(*members[member]):  # type: ignore[misc]
            assert torch.allclose(logits[row], model(token_ids[None]).logits[0], atol=1e-5)
    assert torch.equal(model(IDS).logits, expected)


def test_members_share_a_batch_only_where_matrices_alone_are_trained(folder: Path) -> None:
    forwards = {peft: patched(folder, peft)[1] for peft in ("none", "lora", "prefix", "head")}
    supported = {peft: Population(forward).can_share_batches for peft, forward in forwards.items()}
    assert supported == {"none": False, "lora": True, "prefix": False, "head": True}


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
