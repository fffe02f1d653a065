"""The inputs that torch tests its own optimizers with, and what it asks of each, asked of `MezoOptimizer`."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezo_cli import MezoOptimizer

pytest.importorskip("expecttest", reason="needs expecttest: make test-outside")

from torch.testing._internal import common_optimizers as theirs

INPUTS = [
    pytest.param(given.kwargs, id=f"{name} {given.desc}")
    for name in ("sgd", "adam", "adamw")
    for given in getattr(theirs, f"optim_inputs_func_{name}")("cpu")
    if given.kwargs.keys() <= {"lr", "weight_decay", "momentum", "betas"}  # that a MezoOptimizer has too
]
DATA = torch.linspace(-1, 1, 32).reshape(8, 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def loss_of(model: nn.Module) -> Tensor:
    return (model(DATA) - DATA.sum(1, keepdim=True)).square().mean()


def after(optimizer: MezoOptimizer, model: nn.Module, steps: int) -> list[Tensor]:
    for _ in range(steps):
        optimizer.step(partial(loss_of, model))
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("given", INPUTS)
def test_a_state_dict_goes_on_bit_for_bit(given: dict[str, Any], tmp_path: Path) -> None:
    whole, half, other = network(), network(), network()
    make = partial(MezoOptimizer, **{**given, "lr": float(given.get("lr", 1e-3)), "seed": 3})
    expected, first = after(make(whole), whole, 6), make(half)
    after(first, half, 3)
    torch.save([first.state_dict(), half.state_dict()], tmp_path / "both")
    state, weights = torch.load(tmp_path / "both", weights_only=True)
    other.load_state_dict(weights)
    second = make(other, lr=0.5)  # the state dict's own rate is what counts
    second.load_state_dict(state)
    assert second.state_dict().keys() == state.keys()
    assert all(map(torch.equal, after(second, other, 3), expected))


@pytest.mark.parametrize("given", INPUTS)
def test_the_loss_falls_and_a_group_has_its_own_rate(given: dict[str, Any]) -> None:
    model, start = network(), list(network().parameters())
    groups = [{"params": ["0.weight", "0.bias"]}, {"params": ["2.weight", "2.bias"], "lr": 0.0, "weight_decay": 0.0}]
    optimizer = MezoOptimizer(model, groups, **{**given, "lr": 1e-2, "weight_decay": 0.0})
    schedule, before = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999), loss_of(model).detach()
    for _ in range(200):
        weights = after(optimizer, model, 1)
        schedule.step()
    assert loss_of(model).detach() < before
    assert all(map(torch.equal, weights[2:], start[2:]))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.999**200)


def test_hooks_run_in_torchs_order() -> None:
    model, calls = network(), list[str]()
    optimizer = MezoOptimizer(model, lr=1e-3)
    for when in ("step_pre", "step_post", "state_dict_post", "load_state_dict_pre"):
        getattr(optimizer, f"register_{when}_hook")(lambda *words, when=when: calls.append(when))
    optimizer.step(partial(loss_of, model))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["step_pre", "step_post", "state_dict_post", "load_state_dict_pre"]
