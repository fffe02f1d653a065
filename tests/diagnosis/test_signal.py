"""The signal: what is measured first, the error of g, zeros, the learning rate."""

import dataclasses
from pathlib import Path

import pytest
import torch

from mezo_cli.diagnosis import learning_rate, signal
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Finding, Section
from mezo_cli.diagnosis.learning_rate import Estimate
from mezo_cli.diagnosis.signal import Point
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
