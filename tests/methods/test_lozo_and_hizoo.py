"""LOZO: its low-rank noise, its momentum and runs. HiZOO: its formula in float64; what it is without a curvature."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from mezo_cli.methods.lozo.noise import LowRankNoise
from mezo_cli.methods.lozo.settings import LozoConfig
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params
from mezo_cli.testing.optimizers import Regression, Trial, same
from tests.command_line import Train, error_line
from tests.optim.test_mezo import SENTENCES, ready

CPU = torch.device("cpu")


def low_rank(noise: str = "gaussian", rank: int = 4, interval: int = 3) -> LowRankNoise:
    config = cast(LozoConfig, make_config("lozo", noise=noise, rank=rank, interval=interval))
    return cast(LowRankNoise, config.make_noise())


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    monkeypatch.setattr("mezo_cli.methods.lozo.noise.CHUNK", 64)


@pytest.mark.parametrize("noise", ["gaussian", "rademacher", "torch"])
def test_z_is_u_v_transposed_on_a_matrix_and_dense_elsewhere(noise: str) -> None:
    drawn, direction = low_rank(noise), Direction(1, 5, 2)
    u, v = drawn.left(direction, "w", (40, 30), CPU), drawn.right(direction, "w", (40, 30), CPU)
    z = drawn.z(direction, "w", (40, 30), CPU).view(40, 30)
    torch.testing.assert_close(z.double(), u.double() @ v.double().t(), rtol=1e-6, atol=1e-6)
    assert torch.linalg.matrix_rank(z) == 4
    for shape in ((40,), (3, 30), (5, 6, 7)):
        assert torch.equal(drawn.z(direction, "w", shape, CPU), drawn.base.z(direction, "w", shape, CPU))


def test_v_is_kept_for_an_interval_and_shared_by_its_samples() -> None:
    drawn, shape = low_rank(), (40, 30)
    v = [drawn.right(Direction(1, step, sample), "w", shape, CPU) for step, sample in ((3, 0), (5, 2), (6, 0))]
    assert torch.equal(v[0], v[1])
    assert not torch.equal(v[0], v[2])
    u = [drawn.left(Direction(1, step, sample), "w", shape, CPU) for step, sample in ((3, 0), (4, 0), (4, 1))]
    assert len({tuple(some.flatten().tolist()) for some in u}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_part_of_z_has_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    drawn, direction = low_rank(), Direction(1, 5)
    model = nn.Linear(300, 200).to(dtype)
    params = Params(model, drawn)
    whole = drawn.z(direction, "weight", (200, 300), CPU)
    assert torch.equal(drawn.z(direction, "weight", (200, 300), CPU, 777, 50_001), whole[777:50_001])
    span = params.span_of["weight"]
    plus, minus = torch.empty(2, span.numel, dtype=dtype)
    drawn.perturb(direction, span, 0.25, plus, minus)
    theta = model.weight.detach().float().flatten().clone()
    assert torch.equal(plus[:60_000], (theta + whole * 0.25).to(dtype))
    assert torch.equal(minus[:60_000], (theta - whole * 0.25).to(dtype))
    rows = torch.tensor([3, 199, 3])
    some = torch.empty(3, 300, dtype=dtype)
    drawn.perturb_rows(direction, "weight", model.weight.data, rows, 0.25, some)
    assert torch.equal(some, plus[:60_000].view(200, 300)[rows])
    updated = model.weight.detach().float()
    for _, part in span.split(4096):
        piece = part.pieces[0]
        theta_part = updated.view(-1)[piece.start : piece.start + piece.numel]
        padded = torch.zeros(part.numel)
        padded[: piece.numel] = theta_part
        drawn.update_(part, padded, [(direction, 0.25)], [1.0])
        theta_part.copy_(padded[: piece.numel])
    assert torch.equal(updated.view(-1), theta + whole * 0.25)


def trained(name: str, **values: Any) -> Trial:
    config = make_config(name, lr=0.01, rank=2, interval=3, weight_decay=0.1, **values)
    ours = Trial(OPTIMIZERS.implementation(config.name), config, outputs=5)
    ours.train(0, 8)
    return ours


def test_without_beta_lozo_m_is_lozo_bit_for_bit() -> None:
    for values in ({}, {"samples": 2}):
        lozo, lozo_m = trained("lozo", **values), trained("lozo_m", beta=0.0, **values)
        assert same(lozo.problem.weights(), lozo_m.problem.weights())


def test_momentum_is_the_formula_in_float64_over_two_projections() -> None:
    config: Any = make_config("lozo_m", rank=2, interval=3, beta=0.7)
    problem = Regression(config.make_noise(), outputs=5)
    params, noise = problem.forward.params, problem.forward.params.noise
    want = {name: p.detach().double() for name, p in params.tensors.items()}
    n, m, old = (torch.zeros(*shape, dtype=torch.float64) for shape in ((5, 2), (5,), (6, 2)))
    optimizer: Any = OPTIMIZERS.implementation(config.name)(config, 1, 8)
    for step in range(8):
        g, z = 0.5 - step % 3, Direction(1, step)
        optimizer.apply_updates(params, [(step, [g], 0.125)])
        sides = noise.factors(z, "weight", (5, 6), torch.device("cpu"))
        u, v = (side.double() for side in sides)
        if step in (3, 6):
            n = n @ old.t() @ v / 6
        n, old = 0.7 * n + 0.3 * g * u, v
        m = 0.7 * m + 0.3 * g * noise.z(z, "bias", (5,), "cpu").double()
        want = {"weight": want["weight"] - 0.125 * n @ v.t() / 2, "bias": want["bias"] - 0.125 * m}
    for name, p in params.tensors.items():
        torch.testing.assert_close(p.detach().double(), want[name], rtol=1e-5, atol=1e-5)


def test_a_rank_above_every_matrix_is_refused(train: Train, tmp_path: Path) -> None:
    said = train(tmp_path / "other", "optimizer=lozo", "optimizer.rank=5000")
    assert "optimizer.rank=5000: the largest trained matrix has" in error_line(said)
    assert not (tmp_path / "other" / "trajectory.bin").exists()


@pytest.mark.parametrize("paired", [0, 1024])
def test_losses_from_the_factors_are_those_of_the_whole_z(paired: int, roberta: Path) -> None:
    ours = ready(roberta, "optimizer=lozo", "optimizer.rank=2", f"model.paired_tokens={paired}")
    loss = BatchLoss(ours.objective, [ours.objective.collate(ours.encoder.encode_all(SENTENCES))])
    pairs = []
    for uses in (True, False):
        ours.params.noise.has_factors = uses
        with ours.forward.perturbed(Direction(1, 3), 1e-2):
            pairs.append(loss().double())
    torch.testing.assert_close(pairs[0], pairs[1], rtol=1e-6, atol=0)
    assert not torch.equal(pairs[0][0], pairs[0][1])


LR, WD, ALPHA, EPS = 0.05, 0.1, 0.05, 1e-2


def trial(name: str, **values: Any) -> Trial:
    config = make_config(name, lr=LR, **values)
    return Trial(OPTIMIZERS.implementation(config.name), config)


@pytest.mark.parametrize("name", ["hizoo", "hizoo_scalar"])
def test_a_curvature_alone_lets_the_decay_act_and_ranks_share_theta_too(name: str) -> None:
    ours = trial(name, weight_decay=WD, samples=2)
    assert (ours.config.directions, ours.config.record_width, ours.config.points) == (2, 4, 3)  # type: ignore[attr-defined]
    before = {key: p.clone() for key, p in ours.problem.forward.params.tensors.items()}
    ours.optimizer.apply_updates(ours.problem.forward.params, [(0, [0.0, 0.0, 0.5, 0.0], LR)])
    for key, p in ours.problem.forward.params.tensors.items():
        torch.testing.assert_close(p, before[key] * (1 - LR * WD))


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", ["hizoo", "hizoo_scalar"])
def test_a_step_is_the_formula_in_float64(name: str, samples: int) -> None:
    """The losses, too: L is the mean squared error at theta +- eps z / sqrt(H), with H of the step before."""
    ours = trial(name, weight_decay=WD, alpha=ALPHA, eps=EPS, samples=samples)
    problem, params = ours.problem, ours.problem.forward.params
    want = {key: p.detach().double() for key, p in params.tensors.items()}
    h = {key: torch.ones_like(p) for key, p in want.items()}

    def loss(values: dict[str, torch.Tensor]) -> float:
        x, y = problem.x.double(), problem.y.double()
        return float((x @ values["weight"].t() + values["bias"] - y).square().sum(-1).mean())

    for step in range(8):
        pairs = []
        for sample in range(samples):
            z = {
                key: params.noise.z(Direction(1, step, sample), key, p.shape, "cpu").view(p.shape).double()
                for key, p in want.items()
            }
            plus, minus = (
                loss({key: p + sign * EPS * z[key] / h[key].sqrt() for key, p in want.items()}) for sign in (1, -1)
            )
            curvature = abs(plus + minus - 2 * loss(want)) / (2 * EPS * EPS)
            pairs.append((z, (plus - minus) / (2 * EPS), curvature))
        (record,) = ours.train(step, step + 1)
        assert record[1][:samples] == pytest.approx([g for _, g, _ in pairs], rel=1e-2)
        assert record[1][samples:] == pytest.approx([k for _, _, k in pairs], rel=0.2)  # of float32 losses
        for key, p in want.items():
            mean = sum(k * z[key] ** 2 for (z, _, _), k in zip(pairs, record[1][samples:], strict=True)) / samples
            if name == "hizoo_scalar":
                mean = torch.tensor(sum(record[1][samples:]) / samples)
            h[key] = (1 - ALPHA) * h[key] + ALPHA * mean * h[key]
            g_z = sum(g * z[key] for (z, _, _), g in zip(pairs, record[1], strict=False)) / samples
            want[key] = p - LR * (g_z / h[key].sqrt() + WD * p)
    for key, p in params.tensors.items():
        torch.testing.assert_close(p.detach().double(), want[key], rtol=1e-5, atol=1e-5)


def test_without_alpha_it_is_mezo_with_one_forward_more_bit_for_bit() -> None:
    mezo_records, of_mezo = None, []
    for name in ("mezo", "hizoo", "hizoo_scalar"):
        ours = trial(name) if name == "mezo" else trial(name, alpha=0.0)
        records = [(step, scalars[:1], lr) for step, scalars, lr in ours.train(0, 8)]
        mezo_records, of_mezo = mezo_records or records, of_mezo or ours.problem.weights()
        assert records == mezo_records
        assert same(ours.problem.weights(), of_mezo)
        assert ours.problem.calls == 8 * (2 if name == "mezo" else 3)
