"""The lens: what a forward sees is theta + c z, and theta itself is never touched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from mezo_cli.errors import UserError
from mezo_cli.noise import Direction, make_noise
from mezo_cli.params import Params
from tests.optim.test_mezo import PAIRS, SENTENCES, full_logits, ready

Z = Direction(3, 11)


def displaced(params: Params, stock: nn.Module, c: float) -> None:
    """Move the stock model the plain way."""
    with torch.no_grad():
        for name, p in stock.named_parameters():
            p += c * params.noise.z(Z, name, p.shape, "cpu").view(p.shape)


@pytest.mark.parametrize("kind", ["roberta", "untied", "bert"])
@pytest.mark.parametrize("noise", ["gaussian", "rademacher", "torch"])
def test_a_displaced_forward_equals_one_of_displaced_weights(kind: str, noise: str, request: Any) -> None:
    folder = request.getfixturevalue(kind)
    ours = ready(folder, "task=rte" if kind == "roberta" else "task=sst2", f"optimizer.noise={noise}")
    batch = ours.batch(ours.inputs.encode_all(PAIRS if kind == "roberta" else SENTENCES))
    stock = AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        here = ours.objective.logits(batch)
        with ours.params.at(Z, 0.05):
            there = ours.objective.logits(batch)
        torch.testing.assert_close(here, full_logits(stock, batch, ours.inputs.label_ids), rtol=1e-4, atol=1e-5)
        displaced(ours.params, stock, 0.05)
        torch.testing.assert_close(there, full_logits(stock, batch, ours.inputs.label_ids), rtol=1e-4, atol=1e-5)
        assert (here - there).abs().max() > 1e-3
        assert torch.equal(here, ours.objective.logits(batch))


def test_theta_is_bit_for_bit_where_it_was(roberta: Path) -> None:
    ours = ready(roberta)
    batch = ours.batch(ours.inputs.encode_all(SENTENCES))
    before = {name: p.clone() for name, p in ours.params.tensors.items()}
    with torch.no_grad(), ours.params.at(Z, 10.0):
        ours.objective.logits(batch)
    with pytest.raises(ValueError, match="torn"), ours.params.at(Z, 10.0):
        raise ValueError("torn")
    assert all(torch.equal(before[name], p) for name, p in ours.params.tensors.items())


def test_an_error_inside_a_module_leaves_no_displaced_weight(roberta: Path) -> None:
    ours = ready(roberta)
    with torch.no_grad(), ours.params.at(Z, 10.0), pytest.raises(RuntimeError):
        ours.loaded.model.roberta.encoder.layer[0].output.dense(torch.zeros(1, 5))
    dense = ours.loaded.model.roberta.encoder.layer[0].output.dense
    assert "weight" not in dense.__dict__
    assert dense.weight is ours.params.tensors["roberta.encoder.layer.0.output.dense.weight"]


def test_parameters_that_cannot_reach_the_loss_are_left_out(tmp_path: Path, bert: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(bert)
    model.add_module("unused_head", nn.Linear(32, 7))
    ours = ready(bert)
    params = Params(model, make_noise("gaussian"))
    batch = ours.batch(ours.inputs.encode_all(SENTENCES))
    dead = params.keep_live(lambda: model(**batch.inputs()).logits)
    assert dead == ["unused_head.weight", "unused_head.bias"]
    assert "cls.predictions.bias" in params.tensors


def test_the_pooler_of_a_body_is_left_out(bert: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=2)
    ours = ready(bert)
    params = Params(model, make_noise("gaussian"))
    batch = ours.batch(ours.inputs.encode_all(SENTENCES))
    dead = params.keep_live(lambda: model.bert(**batch.inputs()).last_hidden_state)
    assert set(dead) == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}


def test_nothing_live_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UserError, match="nothing to tune"):
        Params(model, make_noise("gaussian")).keep_live(lambda: torch.zeros(1, requires_grad=True) * 2)


class Odd(nn.Module):
    """Weights read from outside their own module, and a module with parameters that holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.aside = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.scale * x
        return self.inner(before) @ self.aside.weight * self.scale


@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
def test_weights_used_from_outside_their_module_move_too(noise: str) -> None:
    torch.manual_seed(1)
    model, stock = Odd(), Odd()
    stock.load_state_dict(model.state_dict())
    params, x = Params(model, make_noise(noise)), torch.randn(2, 4)
    assert params.keep_live(lambda: model(x)) == ["aside.bias"]
    displaced(params, stock, 0.5)
    with torch.no_grad():
        with params.at(Z, 0.5):
            there = model(x)
        torch.testing.assert_close(there, stock(x))


def test_bfloat16_rounds_the_weights_once_and_keeps_the_masters(roberta: Path) -> None:
    exact, rounded = ready(roberta), ready(roberta, "model.compute_dtype=bfloat16")
    batch = exact.batch(exact.inputs.encode_all(SENTENCES))
    with torch.no_grad(), exact.params.at(Z, 0.01), rounded.params.at(Z, 0.01):
        a, b = exact.objective.logits(batch), rounded.objective.logits(batch)
    assert all(p.dtype == torch.float32 for p in rounded.params.tensors.values())
    assert 0 < (a - b).abs().max() < 0.2


def test_the_scratch_does_not_grow(untied: Path) -> None:
    """An untied decoder leaves the head's own bias dead: a module of which nothing is displaced takes no room."""
    ours = ready(untied)
    batch = ours.batch(ours.inputs.encode_all(SENTENCES))
    ours.params.keep_live(lambda: ours.objective.logits(batch))
    sizes = []
    with torch.no_grad():
        for step in range(3):
            with ours.params.at(Direction(1, step), 1e-3):
                ours.objective.logits(batch)
            sizes.append(ours.params._scratch._buffer.numel())
    assert sizes[0] == sizes[1] == sizes[2]
    assert ours.params._scratch._used == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "objective"), [("roberta", "mlm"), ("untied", "mlm"), ("bert", "mlm"), ("roberta", "cls"), ("bert", "cls")]
)
def test_one_forward_of_both_sides_sees_what_two_forwards_see(
    kind: str, objective: str, dtype: str, request: Any
) -> None:
    ours = ready(request.getfixturevalue(kind), f"model.compute_dtype={dtype}", f"objective={objective}")
    batch = ours.batch(ours.inputs.encode_all(SENTENCES))
    ours.params.keep_live(lambda: ours.objective.logits(batch))
    assert ours.objective.carries(batch)
    with ours.params.at(Z, 0.05, -0.05):
        apart = ours.params.each_side(lambda: ours.objective.logits(batch))
        together = ours.objective.logits(batch)
    assert together.shape == (2, len(SENTENCES), 2)
    assert (apart[0] - apart[1]).abs().max() > 1e-3
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


def test_a_forward_that_does_not_say_how_it_takes_both_sides_is_refused(roberta: Path) -> None:
    ours = ready(roberta)
    batch = ours.batch(ours.inputs.encode_all(SENTENCES))
    with ours.params.at(Z, 0.05, -0.05), pytest.raises(RuntimeError, match="both sides"):
        ours.loaded.model(**batch.inputs())


@pytest.mark.parametrize("noise", ["gaussian", "rademacher", "torch"])
def test_both_sides_of_modules_with_ways_of_their_own(noise: str) -> None:
    """One that owns parameters and holds a module that does, and one of no known type."""
    torch.manual_seed(1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.scale * x) * self.scale

    model = Outer()
    params, x = Params(model, make_noise(noise)), torch.randn(1, 3, 4)
    params.keep_live(lambda: model(x))
    with params.at(Z, 0.5, -0.5):
        apart = params.each_side(lambda: model(x))
        with params.together():
            together = model(x.repeat(2, 1, 1))
    torch.testing.assert_close(together, apart.flatten(0, 1))
    with torch.no_grad():
        displaced(params, model, -0.5)
        torch.testing.assert_close(together[1:], model(x))
