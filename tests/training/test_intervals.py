"""Intervals against published ones, and what the bootstrap must give for a mean."""

import numpy as np
import pytest

from mezo_cli.objectives.scoring import interval, mean_of, paired_difference, wilson


@pytest.mark.parametrize(
    ("right", "rows", "published"),
    [  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilsons_interval_is_the_published_one(right: int, rows: int, published: tuple[float, float]) -> None:
    assert wilson(right, rows) == pytest.approx(published, abs=5e-5)
    assert wilson(rows - right, rows) == pytest.approx((1 - published[1], 1 - published[0]), abs=5e-5)


@pytest.mark.parametrize(
    ("both", "first", "second", "neither", "published"),
    [
        (59, 6, 16, 80, (-0.1186, -0.0046)),  # Cavo 2012, by R's contingencytables (Fagerland et al., chapter 8)
        (1, 1, 7, 12, (-0.507, -0.026)),  # Bentur 2009, there
        (14, 5, 0, 22, (0.011, 0.226)),  # Altman et al., Statistics with confidence, table 6.2
    ],
)
def test_the_interval_of_a_paired_difference_is_the_published_one(
    both: int, first: int, second: int, neither: int, published: tuple[float, float]
) -> None:
    after = np.repeat([True, True, False, False], [both, first, second, neither])
    before = np.repeat([True, False, True, False], [both, first, second, neither])
    assert paired_difference(before, after) == pytest.approx(published, abs=6e-4 if published[0] != -0.1186 else 5e-5)
    low, high = paired_difference(after, before)
    assert (-high, -low) == pytest.approx(published, abs=6e-4)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_rows_that_are_all_alike_have_an_interval_too(share: float) -> None:
    rows = np.full(16, bool(share))
    low, high = paired_difference(rows, rows)
    assert -0.3 < low < 0 < high < 0.3


def test_the_bootstrap_of_a_mean_is_its_standard_error_and_the_same_every_time() -> None:
    values = np.random.default_rng(1).normal(2.0, 1.0, 3000)  # several chunks
    low, high = interval(3000, mean_of(values))
    assert high - low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(3000), rel=0.08)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.003)
    assert [low, high] == interval(3000, mean_of(values))
    assert interval(3000, mean_of(values + 1.0), mean_of(values)) == pytest.approx([1.0, 1.0])
