"""Numbers for figures: smoothing, thinning, counting."""

import numpy as np

from mezo_cli.report.series import extremes, histogram, smoothed, thin_indices


def test_smoothing_keeps_a_line_and_averages_noise() -> None:
    line = smoothed(range(100), [2.0 * step for step in range(100)])
    np.testing.assert_allclose(line.smooth[2:-2], line.values[2:-2])
    noise = smoothed(range(100), [step % 2 for step in range(100)])
    assert noise.window == 5
    np.testing.assert_allclose(noise.smooth[10], np.mean(noise.values[8:13]))
    assert noise.smooth[0] == np.mean(noise.values[:3])


def test_few_values_are_not_smoothed() -> None:
    assert smoothed([1], [0.5]).window == 1
    few = smoothed(range(9), [1.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0])
    np.testing.assert_array_equal(few.smooth, few.values)


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    assert thin_indices(1000, 5).tolist() == [0, 250, 500, 749, 999]
    assert thin_indices(3, 5).tolist() == [0, 1, 2]
    assert thin_indices(0, 5).tolist() == []
    values = np.zeros(1000)
    values[[3, 777]] = 9.0, -9.0
    kept = extremes(values, 50)
    assert len(kept) <= 50
    assert {3, 777} <= set(kept.tolist())


def test_a_histogram_counts_every_value_once() -> None:
    values = np.concatenate([np.zeros(7), np.geomspace(1e-3, 1e3, 93), -np.geomspace(1e-3, 1e3, 100)])
    found = histogram(values)
    assert (found.zeros, found.total, int(found.counts.sum())) == (7, 200, 193)
    assert len(found.edges) == len(found.counts) + 1


def test_equal_values_and_zeros_alone_have_a_histogram() -> None:
    assert histogram(np.full(5, 2.0)).counts.sum() == 5
    assert (histogram(np.zeros(4)).zeros, histogram(np.zeros(4)).counts.size) == (4, 0)
