"""HiZOO: its formula in float64, and what it is without a curvature."""

from typing import Any

import pytest
import torch

from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.perturb.noise import Direction
from mezo_cli.testing.optimizers import Trial, same

pytestmark = pytest.mark.usefixtures("eager_kernels")

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
