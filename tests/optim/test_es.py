"""Evolution strategies: the formulas in float64, MeZO as a special case, refusals, steps without a signal."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mezo_cli.config.compose import build_config
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.optim.es import EsConfig
from mezo_cli.perturb.noise import Direction
from mezo_cli.testing.optimizers import Trial
from tests.command_line import error_line, mezo

EPS, LR = 1e-2, 0.125  # lr is exact in float32

pytestmark = pytest.mark.usefixtures("eager_kernels")


def trial(**values: Any) -> Trial:
    config = make_config("es", **{"eps": EPS, "lr": LR, "members": 6, **values})
    return Trial(OPTIMIZERS.implementation(config.name), config, steps=8)


def theta(ours: Trial) -> list[Tensor]:
    return [p.double() for p in ours.problem.weights()]


def directions(ours: Trial, step: int) -> list[list[Tensor]]:
    """Return z of each direction of a step, for each weight, float64."""
    params = ours.problem.forward.params
    return [
        [
            params.noise.z(Direction(1, step, k), n, p.shape, "cpu").view(p.shape).double()
            for n, p in params.tensors.items()
        ]
        for k in range(ours.config.directions)  # type: ignore[attr-defined]
    ]


def errors(ours: Trial, weights: list[Tensor]) -> Tensor:
    """Return the squared error of each point in float64."""
    weight, bias = weights
    x, y = ours.problem.x.double(), ours.problem.y.double()
    return (x @ weight.T + bias - y).square().flatten()


def shaped(rewards: np.ndarray, of_rows: np.ndarray, at_theta: float, config: EsConfig) -> np.ndarray:
    base = at_theta if config.baseline == "theta" else rewards.mean()
    spread = (of_rows if config.shaping_std == "rows" else rewards).std() + 1e-8
    match config.shaping:
        case "zscore":
            return (rewards - rewards.mean()) / spread
        case "std":
            return (rewards - base) / spread
        case "centered_rank":
            return rewards.argsort().argsort() / (len(rewards) - 1) - 0.5
        case "sign":
            return np.sign(rewards - base)
        case _:
            return rewards - base


SETTINGS: list[dict[str, Any]] = [
    {},
    {"antithetic": True},
    {"shaping": "centered_rank"},
    {"shaping": "sign", "baseline": "theta", "antithetic": True, "eps": 0.5},
    {"shaping": "sign"},
    {"shaping": "none", "baseline": "theta", "weight_decay": 0.5},
    {"shaping": "std", "baseline": "theta", "noise": "rademacher", "members": 8},  # optimizer=fzoo
    {"shaping_std": "rows", "antithetic": True},
    {"anchor": {"l2": 0.5}, "weight_decay": 0.5},
    {"anchor": {"l1": 0.01}},
]


@pytest.mark.parametrize("values", SETTINGS, ids=str)
def test_a_step_is_the_formula_in_float64(values: dict[str, Any]) -> None:
    ours = trial(**values)
    config, eps = ours.config, values.get("eps", EPS)
    assert isinstance(config, EsConfig)
    start = theta(ours)
    for step in range(3):
        before, zs = theta(ours), directions(ours, step)
        ((_, recorded, lr),) = ours.train(step, step + 1)
        signs = (1, -1) if config.antithetic else (1,)
        points = [[p + sign * eps * d for p, d in zip(before, z, strict=True)] for z in zs for sign in signs]
        rows = np.stack([-errors(ours, point).numpy() for point in points])
        s = shaped(rows.mean(1), rows, -float(errors(ours, before).mean()), config)
        c = s[::2] - s[1::2] if config.antithetic else s
        np.testing.assert_allclose(recorded, c, rtol=2e-3, atol=2e-3 * np.abs(c).max())
        for i, (old, new) in enumerate(zip(before, theta(ours), strict=True)):
            estimate = sum(coefficient * z[i] for coefficient, z in zip(recorded, zs, strict=True)) / config.members
            want = old * (1 - lr * config.weight_decay) + lr * estimate
            drift = want - start[i]
            if config.anchor == {"l2": 0.5}:
                want = start[i] + (1 - lr * 0.5) * drift
            if config.anchor == {"l1": 0.01}:
                want = start[i] + drift.sign() * (drift.abs() - lr * 0.01).clamp(min=0)
            torch.testing.assert_close(new, want, rtol=1e-6, atol=1e-6)


def test_two_antithetic_members_without_shaping_are_mezo() -> None:
    ends = []
    for name, values in (("mezo", {"lr": 0.01}), ("es", {"lr": 0.01 / EPS, "members": 2, "shaping": "none"})):
        more = {"antithetic": True} if name == "es" else {}
        config = make_config(name, eps=EPS, weight_decay=0.0, **values, **more)
        run = Trial(OPTIMIZERS.implementation(config.name), config, steps=8)
        before = theta(run)
        run.train(0, 8)
        assert not any(torch.equal(a, b) for a, b in zip(before, theta(run), strict=True))
        ends.append(theta(run))
    for mezos, ours in zip(*ends, strict=True):
        torch.testing.assert_close(ours, mezos, rtol=1e-6, atol=1e-6)


def test_equal_rewards_share_their_rank() -> None:
    ours = trial(shaping="centered_rank", members=4)
    losses = iter([1.0, 3.0, 1.0, 2.0])
    result = ours.optimizer.step(ours.problem.forward, lambda: torch.tensor(next(losses)), 0)
    assert result.recorded == pytest.approx([1 / 3, -0.5, 1 / 3, -1 / 6])
    want = {"loss": 1.75, "loss_std": 0.6875**0.5, "loss_min": 1.0, "loss_max": 3.0, "ties": 1 / 3, "lr": LR}
    assert result.scalars() == pytest.approx(want)


@pytest.mark.parametrize("anchor", [None, {"l2": 0.5}, {"l1": 0.01}], ids=str)
def test_without_a_signal_decay_waits(anchor: dict[str, float] | None, caplog: pytest.LogCaptureFixture) -> None:
    ours = trial(anchor=anchor, weight_decay=0.5)
    start = theta(ours)
    ours.train(0, 1)
    before = theta(ours)
    ours.problem.constant = 2.0
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            result = ours.optimizer.step(ours.problem.forward, ours.problem, step)
            assert result.recorded == [0.0] * 6
            assert (result.scalars()["ties"], result.scalars()["loss_std"]) == (1.0, 0.0)
            assert all(torch.equal(a, b) for a, b in zip(before, theta(ours), strict=True))
    assert [line for line in caplog.messages if "all 6 members have the loss 2" in line] == caplog.messages
    assert len(caplog.messages) == 1
    ours.problem.constant = None
    zs = directions(ours, 3)
    ((_, recorded, lr),) = ours.train(3, 4)
    for i, (old, new) in enumerate(zip(before, theta(ours), strict=True)):
        moved = lr * sum(c * z[i] for c, z in zip(recorded, zs, strict=True)) / 6
        drift = old * (1 - lr * 0.5) ** 3 + moved - start[i]
        if anchor == {"l2": 0.5}:
            drift = drift * (1 - lr * 0.5) ** 3
        elif anchor:
            drift = drift.sign() * (drift.abs() - 3 * lr * 0.01).clamp(min=0)
        torch.testing.assert_close(new, start[i] + drift, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("members=1", "optimizer.members=1: out of range, allowed is a whole number at least 2"),
        ("members=5 antithetic=true", "optimizer.members=5: with optimizer.antithetic=true members are pairs"),
        ("shaping=sign shaping_std=rows", "optimizer.shaping_std=rows: optimizer.shaping=sign divides by no standard"),
        ("baseline=theta", "optimizer.baseline=theta: it has no effect with optimizer.shaping=zscore"),
        ("baseline=theta shaping=centered_rank", "optimizer.baseline=theta: it has no effect with"),
        ("baseline=theta shaping=std antithetic=true", "optimizer.baseline=theta: it cancels in the pairs"),
        ("anchor={l3:1}", "give {l2: LAMBDA} or {l1: LAMBDA}"),
        ("anchor={l1:1,l2:1}", "give {l2: LAMBDA} or {l1: LAMBDA}"),
        ("anchor={l2:-1}", "give {l2: LAMBDA} or {l1: LAMBDA}, LAMBDA above 0"),
        ("anchor={l2:2000}", "times optimizer.lr=0.0005 it is 1 or more"),
        ("anchor=5", "optimizer.anchor=5: expected pairs, e.g. "),
        ("samples=2", "'optimizer.samples=2': optimizer=es does not read it, only optimizer=mezo"),
    ],
)
def test_what_cannot_act_or_is_out_of_range_is_refused(words: str, part: str) -> None:
    with pytest.raises(UserError) as refusal:
        build_config(["optimizer=es", *[f"optimizer.{word}" for word in words.split()]])
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_loss_from_counts_has_no_losses_of_rows(tmp_path: Path) -> None:
    words = ["task=demo-arithmetic", "model=demo-decoder", "data=demo", "objective=generate", "objective.loss=lm"]
    words += ["optimizer=es", "optimizer.shaping_std=rows", "batch_size=4", "steps=1", "data.eval_limit=4"]
    line = error_line(mezo("train", *words, f"hydra.run.dir={tmp_path / 'run'}"))
    assert "objective.loss=lm: single rows have no such loss" in line
    assert not (tmp_path / "run").exists()


def test_losses_of_rows_are_asked_for_where_they_are_read() -> None:
    ours = trial(shaping_std="rows")
    with pytest.raises(UserError, match=r"optimizer.shaping_std=rows: this loss has no losses of single rows"):
        ours.optimizer.step(ours.problem.forward, lambda: torch.zeros(()), 0)
