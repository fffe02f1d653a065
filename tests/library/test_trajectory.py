"""A recorded training is replayed, and continued, bitwise identically."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mezo_cli import MezoOptimizer, replay
from mezo_cli.errors import UserError
from tests.library.test_methods import bits
from tests.library.test_optimizer import loss_of, make


def train(model: nn.Module, path: Path | None, steps: int, **values: object) -> MezoOptimizer:
    optimizer = MezoOptimizer(model, lr=0.05, weight_decay=0.1, samples=2, trajectory=path, **values)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
    for _ in range(steps):
        optimizer.step(lambda: loss_of(model))
        scheduler.step()
    optimizer.close()
    return optimizer


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_it_is_replayed_to_the_same_bits(name: str, tmp_path: Path) -> None:
    model, at_3, start, fresh = (make(name) for _ in range(4))
    train(at_3, None, 3)
    train(model, tmp_path / "run.bin", 6)
    assert bits(model) != bits(fresh)
    assert replay(fresh, tmp_path / "run.bin") == 6
    assert bits(fresh) == bits(model)
    assert replay(start, tmp_path / "run.bin", step=3) == 3
    assert bits(start) == bits(at_3)
    assert (tmp_path / "run.bin").stat().st_size < 1000


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
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"run\.bin is damaged: it is sound up to step 1"):
        replay(make(), path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"the model has no tensor 0\.weight of shape \[12, 6\]"):
        replay(nn.Linear(2, 2), path)
    other = MezoOptimizer(make(), noise="rademacher", samples=2)
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
        MezoOptimizer(nested, samples=2).load_state_dict(done.state_dict())
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
