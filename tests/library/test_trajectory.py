"""A recorded training is replayed, and continued, bitwise identically."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from mezo_cli import MezoOptimizer, replay
from mezo_cli.errors import UserError
from mezo_cli.runs.trajectory import read
from tests.library.test_optimizer import loss_of, make


def bits(model: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def train(model: nn.Module, path: Path | None, steps: int, **values: object) -> MezoOptimizer:
    optimizer = MezoOptimizer(model, lr=0.05, weight_decay=0.1, samples=2, trajectory=path, **values)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
    for _ in range(steps):
        optimizer.step(lambda: loss_of(model))
        scheduler.step()
    optimizer.close()
    return optimizer


def test_what_steps_without_a_gradient_deferred_goes_on_after_an_interruption(tmp_path: Path) -> None:
    """An error rate changes at some steps alone; the groups decay by factors of their own."""
    groups = [{"params": ["0.weight"], "weight_decay": 0.3}, {"params": ["4.weight"], "lr": 0.01}]

    def optimizer_of(model: nn.Module, name: str) -> MezoOptimizer:
        return MezoOptimizer(model, groups, lr=1e-6, weight_decay=0.02, trajectory=tmp_path / name)

    def loss(model: nn.Module, step: int) -> torch.Tensor | float:
        return loss_of(model) if step in (0, 5) else 0.5

    whole, model, again, fresh = (make() for _ in range(4))
    first, second = optimizer_of(whole, "whole.bin"), optimizer_of(model, "run.bin")
    for step in range(6):
        first.step(lambda step=step: loss(whole, step))  # type: ignore[misc]
        if step < 3:
            second.step(lambda step=step: loss(model, step))  # type: ignore[misc]
    assert first.state_dict()["deferred"] == [1.0, 1.0]
    assert second.state_dict()["deferred"] == pytest.approx([(1 - 3e-7) ** 2, (1 - 2e-4) ** 2], abs=1e-11)
    again.load_state_dict(model.state_dict())
    third = optimizer_of(again, "run.bin")
    second.close()
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    for step in range(3, 6):
        third.step(lambda step=step: loss(again, step))  # type: ignore[misc]
    for optimizer in (first, third):
        optimizer.close()
    assert bits(again) == bits(whole)
    assert read(tmp_path / "run.bin").header.decay == "float64"
    replay(fresh, tmp_path / "run.bin")
    assert bits(fresh) == bits(whole)


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_it_is_replayed_to_the_same_bits(name: str, tmp_path: Path) -> None:
    model, start = make(name), make(name)
    initial = bits(start)
    at_3 = copy.deepcopy(start)
    train(at_3, None, 3)
    train(model, tmp_path / "run.bin", 6)
    assert bits(model) != initial
    fresh = copy.deepcopy(start)
    assert replay(fresh, tmp_path / "run.bin") == 6
    assert bits(fresh) == bits(model)
    assert replay(start, tmp_path / "run.bin", step=3) == 3
    assert bits(start) == bits(at_3)
    size = (tmp_path / "run.bin").stat().st_size
    assert size < 1000


def test_it_goes_on_after_an_interruption(tmp_path: Path) -> None:
    whole, model = make(), make()
    train(whole, tmp_path / "whole.bin", 6)
    first = MezoOptimizer(model, lr=0.05, weight_decay=0.1, samples=2, trajectory=tmp_path / "run.bin")
    scheduler = torch.optim.lr_scheduler.LinearLR(first, 1.0, 0.1, total_iters=6)
    for _ in range(5):
        if first.steps == 3:
            saved = copy.deepcopy((model.state_dict(), first.state_dict(), scheduler.state_dict()))
        first.step(lambda: loss_of(model))
        scheduler.step()
    first.close()
    again = make()
    again.load_state_dict(saved[0])
    second = MezoOptimizer(again, lr=0.05, weight_decay=0.1, samples=2, trajectory=tmp_path / "run.bin")
    scheduler = torch.optim.lr_scheduler.LinearLR(second, 1.0, 0.1, total_iters=6)
    second.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    for _ in range(3):
        second.step(lambda: loss_of(again))
        scheduler.step()
    second.close()
    assert bits(again) == bits(whole)
    assert (tmp_path / "run.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "run.bin", make()
    done = train(model, path, 2)
    content = path.read_bytes()
    with pytest.raises(UserError, match="there is a file already"):
        train(make(), path, 1)
    with pytest.raises(UserError, match="started from other weights"):
        replay(model, path)
    with pytest.raises(UserError, match=r"step=3: .* holds steps 0 to 2"):
        replay(make(), path, step=3)
    with pytest.raises(UserError, match=r"the model has no tensor 0\.weight of shape \[12, 6\]"):
        replay(nn.Linear(2, 2), path)
    other = MezoOptimizer(make(), noise="rademacher")
    with pytest.raises(UserError, match="its noise is gaussian, this optimizer's is rademacher"):
        other.load_state_dict(done.state_dict())
    with pytest.raises(UserError, match="it is of no MezoOptimizer: steps is missing"):
        other.load_state_dict(torch.optim.SGD(make().parameters()).state_dict())
    ahead = MezoOptimizer(model, lr=0.05, weight_decay=0.1, samples=2, trajectory=path)
    ahead.load_state_dict({**done.state_dict(), "steps": 5})
    with pytest.raises(UserError, match=r"it has 2 steps, and the state_dict is of step 5"):
        ahead.step(lambda: loss_of(model))
    nested = nn.ModuleDict({"inner": make()})
    with pytest.raises(UserError, match="its groups are not of the same tensors, by name"):
        MezoOptimizer(nested).load_state_dict(done.state_dict())
    assert path.read_bytes() == content


def test_groups_are_replayed_and_one_with_rate_0_stays(tmp_path: Path) -> None:
    model, fresh = make(), make()
    groups = [
        {"params": ["0.weight"], "lr": 0.0},
        {"params": ["4.weight"], "lr": 0.02},
        {"params": ["4.bias"], "weight_decay": 0.0},
    ]
    train(model, tmp_path / "run.bin", 4, params=groups)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, fresh.get_parameter(name))]
    assert changed == ["4.weight", "4.bias"]
    replay(fresh.requires_grad_(False), tmp_path / "run.bin")
    assert bits(fresh) == bits(model)


def test_the_first_groups_rate_may_fall_to_0() -> None:
    model = make()
    optimizer = MezoOptimizer(model, [{"params": ["0.weight"], "lr": 0.1}, {"params": ["4.weight"]}], lr=0.1)
    optimizer.step(lambda: loss_of(model))
    optimizer.param_groups[0]["lr"] = 0.0
    before = {name: p.data.clone() for name, p in model.named_parameters()}
    optimizer.step(lambda: loss_of(model))
    assert model[4].weight.isfinite().all()
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == {"4.weight"}


def test_the_ratio_of_the_groups_rates_is_fixed_where_it_is_recorded(tmp_path: Path) -> None:
    model = make()
    groups = [{"params": ["0.weight"], "lr": 0.02}, {"params": ["4.weight"], "lr": 0.04}]
    optimizer = MezoOptimizer(model, groups, trajectory=tmp_path / "run.bin")
    optimizer.step(lambda: loss_of(model))
    before = bits(model)
    optimizer.param_groups[1]["lr"] = 0.03
    with pytest.raises(UserError, match="the ratios of the groups' lr must stay as they began"):
        optimizer.step(lambda: loss_of(model))
    assert bits(model) == before
