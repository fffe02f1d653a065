"""What a run's recorded values say: diverged, improved, not improved. The limits are those of the docstring."""

from collections.abc import Sequence
from typing import Any

import pytest

from mezo_cli.training.verdict import Divergence, verdict

FIRST = [0.5, 0.9] * 5  # mean 0.7, std 0.2: the last ten may have a mean of 0.7 + 3 * 0.7 = 2.8


def dev(loss: float, *predicted: int) -> dict[str, Any]:
    counts = dict(zip(("negative", "positive"), predicted, strict=True))
    return {"kind": "eval", "split": "dev", "loss": loss, "predicted": counts}


def diverged_after(lines: Sequence[dict[str, Any]]) -> list[int]:
    """Return after which lines (from 1) the run counts as diverged."""
    found = Divergence()
    return [number for number, line in enumerate(lines, 1) if found.add(line) or found.reason is not None]


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"kind": "train", "loss": value} for value in values]


@pytest.mark.parametrize(
    ("values", "after"),
    [
        (FIRST + [2.79] * 10, []),
        (FIRST + [2.81] * 10, [20]),
        (FIRST + [0.7] * 500 + [100.0], [511]),  # one loss that makes up for nine
        (FIRST + [0.7] * 500 + [20.0] + [0.7] * 5, []),
        ([0.01] * 10 + [0.30] * 10, []),  # the rise is less than 3 * 0.1
        ([0.01] * 10 + [0.32] * 10, [20]),
        ([10.0] + [0.0] * 9 + [9.9] * 10, []),  # mean 1, std 3
        ([10.0] + [0.0] * 9 + [10.1] * 10, [20]),
        ([-5.0] * 10 + [9.0] * 10, []),  # a loss may be negative: 3 * 5 are allowed
        ([-5.0] * 10 + [11.0] * 10, [20]),
        ([0.1, 5.0], []),  # few losses: 30 / w times the largest of mean, std and 1
        ([0.7, 30.8], [2]),
        ([0.7, 0.7, 0.7, 10.0, 11.0], []),
        ([0.7, 0.7, 0.7, 20.0, 20.0], [5]),
        ([0.7, *[1e6] * 30], list(range(2, 32))),  # the limit stays that of before, though the first ten are high too
        ([0.7, 1e6, *[0.7] * 30], [2]),
        ([0.7] * 200, []),
    ],
)
def test_a_run_has_diverged_when_its_losses_rise_far_above_the_first(values: list[float], after: list[int]) -> None:
    assert diverged_after(losses(*values)) == after


@pytest.mark.parametrize(
    ("lines", "after"),
    [
        ([dev(0.7, 3, 5), dev(0.8, 0, 8)], [2]),
        ([dev(0.7, 3, 5), dev(0.6, 0, 8)], []),  # the loss is not above that of step 0
        ([dev(0.7, 3, 5), dev(0.8, 1, 7)], []),
        ([dev(0.7, 8, 0), dev(9.0, 0, 8)], []),  # it was one label at step 0
        ([dev(0.7, 3, 5), dev(0.8, 0, 8), dev(0.8, 4, 4)], [2]),  # it has recovered
        ([dev(0.7, 3, 5), {**dev(9.0, 0, 8), "split": "test"}], []),
    ],
)
def test_a_run_has_diverged_when_it_comes_to_predict_one_label(lines: list[dict[str, Any]], after: list[int]) -> None:
    assert diverged_after(lines) == after


def test_the_verdict_follows_from_the_picked_step_unless_the_run_diverged() -> None:
    assert [verdict(False, 20, 40), verdict(False, 0, 40), verdict(True, 20, 40), verdict(True, 0, 40)] == [
        "improved",
        "not_improved",
        "diverged",
        "diverged",
    ]
    assert verdict(False, 0, 0) is None
