"""The runner's methods in a loop of one's own: the same bits, recorded, replayed and continued."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezo_cli import MezoOptimizer, replay
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.runs.trajectory import read
from tests.library.test_optimizer import loss_of, make

pytestmark = pytest.mark.usefixtures("eager_kernels")

STEPS = 6
SAMPLES, SIGNS = {"samples": 3, "sample_schedule": "linear"}, {"noise": "rademacher"}
METHODS: dict[str, tuple[dict[str, Any], Any]] = {
    "mezo": ({}, make_config("mezo")),
    "momentum": ({"momentum": 0.9}, make_config("mezo_momentum", momentum=0.9)),
    "adam": ({"betas": (0.8, 0.95)}, make_config("mezo_adam", beta1=0.8, beta2=0.95)),
    "samples": ({**SAMPLES, "total_steps": STEPS}, make_config("mezo", **SAMPLES)),
    "adam, samples": ({"betas": (0.9, 0.999), **SAMPLES, "total_steps": STEPS}, make_config("mezo_adam", **SAMPLES)),
    "rademacher": ({"betas": (0.9, 0.9), **SIGNS}, make_config("mezo_adam", beta2=0.9, **SIGNS)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPS = [{"params": ["0.weight", "4.bias"], "weight_decay": 0.3}, {"params": ["4.weight", "0.bias"], "lr": 0.02}]


def bits(model: nn.Module) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_the_runners(name: str, dtype: torch.dtype) -> None:
    ours, theirs = make().to(dtype), make().to(dtype).eval()
    values, config = METHODS[name]
    config = config.replace(lr=0.01, weight_decay=0.1)
    optimizer = MezoOptimizer(ours, lr=0.01, weight_decay=0.1, seed=3, **values)
    forward = PerturbedForward(theirs, Params(theirs, make_noise(config.noise)))
    forward.compute_dtype = dtype
    runner = OPTIMIZERS.implementation(config.name)(config, 3, STEPS)
    for step in range(STEPS):
        loss = optimizer.step(lambda: loss_of(ours))
        with torch.no_grad():
            expected = runner.step(forward, lambda: forward.forward_per_sign(lambda: loss_of(theirs)), step)
        assert optimizer.result == expected
        assert loss == expected.loss
    assert bits(ours) == bits(theirs)
    assert ours[0].weight.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_it_is_replayed_and_continued_to_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:

    def optimizer_of(model: nn.Module, path: str) -> MezoOptimizer:
        return MezoOptimizer(model, GROUPS, lr=0.01, weight_decay=0.1, trajectory=tmp_path / path, **METHODS[name][0])

    def loss(model: nn.Module, step: int) -> Tensor | float:
        return 0.5 if step in (2, 3) else loss_of(model)

    whole, half, again, fresh = (make().to(dtype) for _ in range(4))
    first, second = optimizer_of(whole, "whole.bin"), optimizer_of(half, "run.bin")
    for step in range(STEPS):
        first.step(partial(loss, whole, step))
        if step < 3:
            second.step(partial(loss, half, step))
    assert second.state_dict()["deferred"] == pytest.approx([1 - 0.01 * 0.3, 1 - 0.02 * 0.1])
    torch.save(second.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(half.state_dict())
    third = optimizer_of(again, "run.bin")
    second.close()
    third.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(3, STEPS):
        third.step(partial(loss, again, step))
    first.close()
    third.close()
    assert bits(again) == bits(whole)
    assert (tmp_path / "run.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert replay(fresh, tmp_path / "whole.bin") == STEPS
    assert bits(fresh) == bits(whole)
    assert read(tmp_path / "whole.bin").header.dtype == str(dtype).removeprefix("torch.")


def test_a_loss_in_half_precision_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = make().bfloat16()
    MezoOptimizer(model).step(lambda: loss_of(model).bfloat16())
    assert "the loss is torch.bfloat16" in caplog.text


def test_a_state_of_another_method_or_dtype_is_refused(tmp_path: Path) -> None:
    model = make()
    optimizer = MezoOptimizer(model, momentum=0.5, trajectory=tmp_path / "run.bin")
    optimizer.step(lambda: loss_of(model))
    state = optimizer.state_dict()
    with pytest.raises(UserError, match=r"state_dict: its momentum is 0\.5, this optimizer's is 0\.0"):
        MezoOptimizer(make()).load_state_dict(state)
    with pytest.raises(UserError, match=r"state_dict: its betas is None, this optimizer's is \(0\.9, 0\.99\)"):
        MezoOptimizer(make(), betas=(0.9, 0.99)).load_state_dict(MezoOptimizer(make()).state_dict())
    with pytest.raises(UserError, match=r"state_dict: it does not hold the state of mezo_momentum at step 2"):
        MezoOptimizer(make(), momentum=0.5).load_state_dict({**state, "steps": 2})
    with pytest.raises(UserError, match=r"0\.weight was trained in float32; the model has it in torch\.bfloat16"):
        replay(make().bfloat16(), tmp_path / "run.bin")
    mixed = make()
    mixed[4].bfloat16()
    with pytest.raises(UserError, match=r"4\.weight is torch\.bfloat16 and 0\.weight is torch\.float32"):
        MezoOptimizer(mixed)
    with pytest.raises(UserError, match=r"0\.weight is torch\.float64; MezoOptimizer tunes tensors of torch\.float32,"):
        MezoOptimizer(make().double())


def test_a_backward_in_the_closure_is_one_line() -> None:
    model = make()
    optimizer = MezoOptimizer(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    before = bits(model)
    with pytest.raises(UserError, match=r"the closure calls backward\(\): MeZO needs no gradient"):
        optimizer.step(closure)
    assert bits(model) == before
    assert all(p.grad is None for p in model.parameters())
    optimizer.step(lambda: loss_of(model))  # it is as it was
    loss_of(model).backward()  # outside, all may


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


def test_a_trajectory_that_does_not_fit_is_refused(tmp_path: Path) -> None:
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
