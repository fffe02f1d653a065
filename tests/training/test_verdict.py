"""What a run's recorded values say: diverged, or whether the picked step is better than the untrained model."""

from typing import Any

import pytest

from mezo_cli.config import compose
from mezo_cli.training.divergence import Divergence
from mezo_cli.training.finish import judge_difference

FIRST = [0.5, 0.9] * 5  # mean 0.7, std 0.2: the mean of ten may rise to 0.7 + 3 * 0.7 = 2.8


@pytest.mark.parametrize(
    ("values", "after"),
    [
        (FIRST + [2.79] * 10, []),
        (FIRST + [2.81] * 10, [20]),
        (FIRST + [0.7] * 500 + [100.0], [511]),  # one loss that makes up for nine
        (FIRST + [0.7] * 500 + [20.0] + [0.7] * 5, []),
        (FIRST + [0.1] * 20 + [2.4] * 10, [40]),  # above the lowest mean, 0.1, not above the first
        ([0.01] * 10 + [0.30] * 10, []),  # the rise is less than 3 * 0.1
        ([0.01] * 10 + [0.32] * 10, [20]),
        ([10.0] + [0.0] * 9 + [2.9] * 10, []),  # mean 1, std 3, then the lowest mean is 0
        ([-5.0] * 10 + [9.0] * 10, []),  # a loss may be negative: 3 * 5 are allowed
        ([-5.0] * 10 + [11.0] * 10, [20]),
        ([0.7] * 9 + [1e9], []),  # nothing to compare with
        ([0.7, *[1e6] * 30], []),  # the first ten are high
        ([0.7] * 200, []),
    ],
)
def test_a_run_has_diverged_when_its_losses_rise_far_above_the_lowest(values: list[float], after: list[int]) -> None:
    found = Divergence()
    assert [number for number, loss in enumerate(values, 1) if found.add(loss) or found.reason is not None] == after


@pytest.mark.parametrize(
    ("metric", "rows", "interval", "repeatable", "expected", "said"),
    [
        ("accuracy", 12, (0.01, 0.2), True, "improved", "+10.0 points (95% interval +1.0 to +20.0)"),
        ("accuracy", 12, (-0.01, 0.2), True, "within_noise", "which has 0 in it"),
        ("accuracy", 12, (0.0, 0.2), True, "within_noise", "which has 0 in it"),
        ("accuracy", 12, (-0.2, -0.01), True, "worse", "test accuracy 50.0% before training, 60.0% at step 4"),
        ("accuracy", 12, (0.01, 0.2), False, "within_noise", "the reward gave other numbers"),
        ("loss", 12, (0.01, 0.2), True, "worse", "test loss 0.5000 before training"),  # a lower loss is better
        ("loss", 12, (-0.2, -0.01), True, "improved", "(95% interval -0.2000 to -0.0100)"),
        ("accuracy", 9, (0.01, 0.2), True, "not_compared", "test has 9 rows, and a comparison needs 10"),
        ("f1", 12, None, True, "not_compared", "no interval of f1"),
    ],
)
def test_the_verdict_is_the_side_of_zero_on_which_the_interval_lies(
    metric: str, rows: int, interval: Any, repeatable: bool, expected: str, said: str
) -> None:
    config = compose.load([f"metric={metric}", "data.dir=x", "data=files"], None).config
    difference = {metric: 0.1, "intervals": {} if interval is None else {metric: list(interval)}}
    found = judge_difference(config, "test", 4, rows, (0.5, 0.6), difference, repeatable)
    assert (found[0], said in found[1]) == (expected, True), found
