"""The signal: what is measured first, the error of g, zeros, and the learning rate at which a step helps most."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mezo_cli.config.compose import build_config
from mezo_cli.diagnosis import learning_rate, signal
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Finding, Section
from mezo_cli.diagnosis.learning_rate import Estimate, estimate, judge
from mezo_cli.diagnosis.signal import Point, batches_of, whole_directions
from mezo_cli.optim.mezo import spsa
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.training.precision import Agreement
from tests.diagnosis.sessions import config, load, named, only

pytestmark = pytest.mark.usefixtures("eager_kernels")


class Ticks:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def checked(model: Path, *words: str) -> dict[str, Finding]:
    """Measure four directions in every way: one batch has all rows, which spares the second one."""
    return named(signal.check(load(model, "batch_size=24", *words), Deadline(60.0, Ticks())))


def test_a_resolved_signal_has_no_doubt_and_keeps_its_eps(roberta: Path) -> None:
    found = checked(roberta, "optimizer.eps=1e-2")
    assert found["resolution"].verdict == found["zeros"].verdict == OK
    assert found["resolution"].figures["recommended"] == 1e-2
    exact = next(row for row in found["resolution"].figures["rows"] if row["dtype"] == "float32")
    assert exact["relative_error"] == 0.0


def test_a_loss_without_a_gradient_gives_zeros(roberta: Path) -> None:
    found = checked(roberta, "objective.loss=accuracy")
    assert found["zeros"].verdict == DOUBT
    assert "accuracy" in found["zeros"].advice


def test_theta_stays_and_without_time_nothing_is_known(roberta: Path) -> None:
    prepared = load(roberta)
    tensors = prepared.session.params.tensors
    before = {name: p.clone() for name, p in tensors.items()}
    found = named(signal.check(prepared, Deadline(0.0)))
    assert found["resolution"].verdict == found["learning_rate"].verdict == UNKNOWN
    assert all(torch.equal(before[name], p) for name, p in tensors.items())


@pytest.mark.parametrize("words", [["steps=0"], ["optimizer=adamw"]])
def test_without_projected_gradients_nothing_is_measured(words: list[str], roberta: Path) -> None:
    assert list(checked(roberta, *words)) == ["not_needed"]


TERMS = {"gain": 4.0, "gain_error": 1.0, "harm": 4000.0, "curvature": 800.0, "curvature_floor": 0.1, "loss": 0.7}
FOUND = Estimate(**TERMS, lr=1e-3, lr_error=2e-4, directions=16)


@pytest.mark.parametrize(
    ("lr", "steps", "verdict", "said"),
    [
        (5e-4, 100, OK, ""),
        (1e-6, 100_000, OK, ""),
        (1e-6, 100, DOUBT, "the loss falls by 0.0004 of 0.7 in 100 steps"),
        (5e-3, 100, DOUBT, "expected to raise the loss"),
    ],
)
def test_the_run_s_learning_rate_is_judged(lr: float, steps: int, verdict: str, said: str) -> None:
    section = Section("signal")
    learning_rate.judge(section, FOUND, config(f"optimizer.lr={lr}", f"steps={steps}"), None, 10**9)
    found = only(section)
    assert found.verdict == verdict
    assert said in f"{found.text} -> {found.advice}"
    assert found.figures["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("changed", "larger_eps", "why", "advice"),
    [
        ({"gain": 0.5}, None, "the noise of the batches", "more --seconds"),
        ({"curvature": -3.0}, None, "does not curve upwards", "more --seconds"),
        ({"curvature": 0.1}, None, "eps=1e-05 is so small that rounding hides", "use optimizer.eps=0.001"),
        ({"gain": 0.5}, 1e-2, "eps=1e-05 is so small that rounding hides", "use optimizer.eps=0.01"),
        (None, None, "fewer than 4 directions", "more --seconds"),
    ],
)
def test_a_learning_rate_that_cannot_be_told_is_unknown_and_its_cause_is_named(
    changed: dict[str, float] | None, larger_eps: float | None, why: str, advice: str
) -> None:
    section, unclear = Section("signal"), None if changed is None else dataclasses.replace(FOUND, **changed)
    learning_rate.judge(section, unclear, config("optimizer.eps=1e-5"), larger_eps, 10**9)
    found = only(section)
    assert found.verdict == UNKNOWN
    assert found.figures["lr"] is None
    assert why in found.text
    assert advice in found.advice


def row(eps: float, error: float, directions: int = 8) -> signal.Row:
    return eps, "float32", Agreement(1.0, 0.0, 0.0, directions), error


@pytest.mark.parametrize(
    ("eps", "rows", "verdict", "recommended"),
    [
        (1e-3, [row(1e-4, 1e-4), row(1e-3, 4e-4), row(1e-2, 0.04)], OK, 1e-3),
        (
            1e-7,
            [row(1e-7, 0.09), row(1e-4, 1e-4), row(1e-3, 4e-4), row(1e-2, 0.04)],
            DOUBT,
            1e-4,
        ),  # an outside reader's
        (1e-2, [row(1e-4, 1e-4), row(1e-3, 4e-4), row(1e-2, 0.15)], OK, 1e-2),
        (1e-2, [row(1e-4, 1e-4), row(1e-3, 4e-4), row(1e-2, 0.3)], NOTE, 1e-4),
        (1e-2, [row(1e-4, 1e-4), row(1e-3, 4e-4), row(1e-2, 0.6)], DOUBT, 1e-4),
        (1e-2, [row(1e-3, 0.3), row(1e-2, 0.6)], DOUBT, None),
        (1e-2, [row(1e-2, 0.0)], UNKNOWN, 1e-2),  # compared with itself alone
        (1e-2, [row(1e-4, 1e-4, 1), row(1e-2, 0.0, 1)], UNKNOWN, 1e-2),
        (1e-7, [row(1e-7, float("inf"))], UNKNOWN, 1e-7),
    ],
)
def test_an_eps_is_judged(eps: float, rows: list[signal.Row], verdict: str, recommended: float | None) -> None:
    section = Section("signal")
    assert signal.judge_resolution(section, rows, eps, "float32", 6e-9 / eps, "") == (recommended or eps)
    found = only(section)
    assert found.figures.get("recommended", recommended) == recommended
    assert found.verdict == verdict
    assert ("rounding" in found.text) == (eps == 1e-7)
    assert (f"try optimizer.eps={recommended or 0:g}" in found.advice) == (recommended not in (None, eps))
    assert ("no eps of the table does" in found.advice) == (recommended is None)


def test_the_record_has_no_number_that_json_lacks() -> None:
    section = Section("signal")
    section.add(OK, "x", "text", table=[("a",)], error=float("inf"), rows=[{"correlation": float("nan")}])
    (record,) = section.record()["findings"]
    assert record.keys() == {"name", "verdict", "text", "figures", "advice"}
    assert record["figures"] == {"error": None, "rows": [{"correlation": None}]}


def test_rounding_of_the_smallest_eps_is_its_error_not_0() -> None:
    losses = {Point(0, 0, eps, "float32"): (0.7 + eps, 0.7 - eps) for eps in (1e-3, 1e-2)}
    found = {one[0]: one[3] for one in signal.compare(losses, 1e-3)}
    assert found[1e-3] == pytest.approx(2**-24 * 0.701 / 1e-3)


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
