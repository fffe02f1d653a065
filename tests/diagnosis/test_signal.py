"""The signal: what is measured first, the error of g, zeros, the learning rate."""

import dataclasses
from pathlib import Path

import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, Example
from mezo_cli.diagnosis import signal
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import DOUBT, OK, Finding, Section
from mezo_cli.diagnosis.learning_rate import Estimate
from mezo_cli.diagnosis.losses import Point, plan_points
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.training.setup import prepare
from tests import tiny

pytestmark = pytest.mark.usefixtures("eager_kernels")


class Ticks:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def prepared(model: Path, *words: str) -> Prepared:
    session = prepare(build_config([f"model.path={model}", "task=sst2", "data=demo", "batch_size=8", *words]))
    rows = [Example((row["sentence"],), int(row["label"] == "positive")) for row in tiny.movie_rows(24)]
    encoded = session.encoder.encode_all(rows)
    session.exclude_unreachable(encoded[0])
    return Prepared(session, encoded, encoded, None, {}, 0.0)


def checked(model: Path, *words: str) -> dict[str, Finding]:
    """Measure four directions in every way: one batch has all rows, which spares the second one."""
    section = signal.check(prepared(model, "batch_size=24", *words), Deadline(26.0, Ticks()))
    return {one.name: one for one in section.findings}


def test_the_most_important_points_come_first() -> None:
    points = list(plan_points(1e-3, whole=False))
    assert points[0] == Point(0, 0, 1e-3, "float32")
    assert points[1] == Point(0, 0, 1e-3, "bfloat16")
    assert Point(3, 7, 1e-3, "float32") in points[:24]  # the second batch of a direction, for the learning rate
    assert {point.batch for point in plan_points(1e-3, whole=True)} == {0}


def test_a_resolved_signal_has_no_doubt_and_keeps_its_eps(roberta: Path) -> None:
    found = checked(roberta, "optimizer.eps=1e-2")
    assert found["resolution"].verdict == found["zeros"].verdict == OK
    assert found["recommended_eps"].figures["eps"] == 1e-2
    exact = next(row for row in found["recommended_eps"].figures["rows"] if row["dtype"] == "float32")
    assert exact["relative_error"] == 0.0
    grad = found["projected_grad"].figures
    assert 0 < grad["min_abs"] <= grad["mean_abs"] <= grad["max_abs"]


def test_an_eps_too_small_for_bfloat16_is_a_doubt(roberta: Path) -> None:
    found = checked(roberta, "optimizer.eps=1e-5", "model.compute_dtype=bfloat16")
    assert found["resolution"].verdict == DOUBT
    assert found["resolution"].figures["relative_error"] > 0.5
    assert found["recommended_eps"].figures["eps"] > 1e-5
    assert "float32" in found["resolution"].advice


def test_an_eps_too_large_for_the_derivative_is_a_doubt(roberta: Path) -> None:
    found = checked(roberta, "optimizer.eps=1")
    assert found["resolution"].verdict == DOUBT
    assert "the loss bends within eps: try optimizer.eps=" in found["resolution"].advice
    assert found["recommended_eps"].figures["eps"] < 1


def test_a_loss_without_a_gradient_gives_zeros(roberta: Path) -> None:
    found = checked(roberta, "objective.loss=accuracy")
    assert found["zeros"].verdict == DOUBT
    assert "accuracy" in found["zeros"].advice


def test_theta_stays_and_what_time_cut_is_named(roberta: Path) -> None:
    given = prepared(roberta)
    before = {name: p.clone() for name, p in given.session.params.tensors.items()}
    section = signal.check(given, Deadline(0.0))
    assert section.cut == [
        "1 of 32 directions for the learning rate",
        "0 of 32 for eps 0.0001, 0.01",
        "1 of 32 for eps 0.001",
    ]
    assert all(torch.equal(before[name], p) for name, p in given.session.params.tensors.items())


@pytest.mark.parametrize("words", [["steps=0"], ["optimizer=adamw"]])
def test_without_projected_gradients_nothing_is_measured(words: list[str], roberta: Path) -> None:
    assert list(checked(roberta, *words)) == ["not_needed"]


# --- the learning rate ---

FOUND = Estimate(
    gain=4.0,
    gain_error=1.0,
    harm=4000.0,
    batch_gain=5.0,
    curvature=800.0,
    curvature_floor=0.1,
    loss=0.7,
    lr=1e-3,
    lr_error=2e-4,
    directions=16,
)


def config(*words: str) -> Config:
    return build_config(["data=demo", *words])


@pytest.mark.parametrize(
    ("lr", "steps", "verdict", "said"),
    [
        (5e-4, 100, OK, ""),
        (1e-6, 100_000, OK, ""),
        (1e-6, 100, DOUBT, "falls by 0.0004 of 0.7 in 100 steps: raise optimizer.lr, up to 1e-03, or steps"),
        (5e-3, 100, DOUBT, "expected to raise the loss"),
    ],
)
def test_the_run_s_learning_rate_is_judged(lr: float, steps: int, verdict: str, said: str) -> None:
    section = Section("signal")
    signal.judge_learning_rate(section, FOUND, config(f"optimizer.lr={lr}", f"steps={steps}"))
    (found,) = section.findings
    assert found.verdict == verdict
    assert said in found.advice
    assert "the paper's grid: 1e-07 to 1e-05" in found.text
    assert found.figures["lr"] == pytest.approx(1e-3)


def test_no_learning_rate_is_given_where_none_can_be_told() -> None:
    plain = config()
    for unclear in (dataclasses.replace(FOUND, gain=0.5), dataclasses.replace(FOUND, curvature=-3.0), None):
        section = Section("signal")
        signal.judge_learning_rate(section, unclear, plain)
        assert section.findings[0].verdict == OK
        assert section.findings[0].figures.get("lr") is None


def test_adam_gets_no_estimate_and_its_own_grid() -> None:
    section = Section("signal")
    signal.judge_learning_rate(section, FOUND, config("optimizer=mezo_adam"))
    assert "derived for mezo alone; the paper's grid: 1e-06 to 0.001" in section.findings[0].text
