"""The learning rate at which a step helps most, on a quadratic whose gradient and Hessian are known."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from mezo_cli.config.compose import build_config
from mezo_cli.diagnosis.findings import Section
from mezo_cli.diagnosis.learning_rate import Estimate, estimate, judge
from mezo_cli.diagnosis.signal import Point, batches_of, whole_directions
from mezo_cli.optim.mezo import spsa
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params

EPS = 1e-3
SIZE = 40
H = torch.linspace(0.5, 3.0, SIZE)
GRADIENT = torch.cos(torch.arange(SIZE))  # at theta, of the loss over all rows
NOISE = 0.3  # std of a batch's gradient around it


class Quadratic(nn.Module):
    """Loss of a batch: a quadratic with a known Hessian and a gradient that differs between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(SIZE))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient * self.theta).sum() + (H * self.theta**2).sum() / 2


def batch_gradient(batch: int) -> torch.Tensor:
    return GRADIENT + NOISE * torch.randn(SIZE, generator=torch.Generator().manual_seed(batch))


@torch.no_grad()
def measured(monkeypatch: pytest.MonkeyPatch, directions: int) -> np.ndarray:
    """What the doctor measures, by the step's own `spsa`."""
    monkeypatch.setenv("MEZO_EAGER", "1")
    model = Quadratic()
    forward = PerturbedForward(model, Params(model, make_noise("gaussian")))

    def loss(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        one = partial(model, gradient)
        return lambda: forward.forward_per_sign(one) if forward.num_signs == 2 else one()

    found: dict[Point, tuple[float, float]] = {}
    for k in range(directions):
        for batch in batches_of(k, whole=False):
            of_batch = loss(batch_gradient(batch))
            ((plus, minus, _),) = spsa(forward, of_batch, [Direction(0, k)], EPS)
            found[Point(k, batch, EPS, "float32")] = plus, minus
            found[Point(-1, batch, 0.0, "float32")] = (float(of_batch()),) * 2
    return whole_directions(found, EPS, whole=False)


def test_the_terms_and_the_best_lr_are_those_of_a_known_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate(measured(monkeypatch, 250), EPS)
    assert found is not None
    squared, of_batch = float((GRADIENT**2).sum()), float((GRADIENT**2).sum()) + SIZE * NOISE**2
    # E[(z.a)^2 z.Hz] = |a|^2 tr H + 2 a.Ha for a Gaussian z
    harm = of_batch * float(H.sum()) + 2 * float((H * (GRADIENT**2 + NOISE**2)).sum())
    assert found.gain == pytest.approx(squared, rel=0.25)
    assert found.curvature == pytest.approx(float(H.sum()), rel=0.05)
    assert found.harm == pytest.approx(harm, rel=0.3)
    assert found.lr == pytest.approx(squared / harm, rel=0.25)
    assert found.lr_error < 0.15 * found.lr
    assert found.is_resolved


def test_too_few_directions_and_pure_noise_give_no_learning_rate() -> None:
    assert estimate(np.zeros((3, 2, 3)), EPS) is None
    g, h = np.random.RandomState(0).randn(16, 2), np.tile([0.1, -0.1], (16, 1))
    curved = h * EPS**2 / 2
    flat = estimate(np.stack([curved + g * EPS, curved - g * EPS, np.zeros_like(g)], axis=2), EPS)
    assert flat is not None
    assert not flat.is_resolved


@pytest.mark.parametrize(("lr", "verdict"), [("1e-6", "doubt"), ("2e-5", "ok"), ("2e-4", "ok"), ("0.5", "doubt")])
def test_a_rate_far_below_the_table_is_too_small_however_many_steps(lr: str, verdict: str) -> None:
    config = build_config(["model=demo", f"optimizer.lr={lr}", "steps=1000000"])
    section = Section("signal")
    judge(section, Estimate(10.0, 1.0, 5000.0, 300.0, 1.0, 0.7, 2e-3, 1e-4, 32), config, None, 5_000_000)
    (finding,) = section.findings
    assert finding.verdict == verdict, finding.text
