"""Numbers for figures: thinning, counting, labels, trials of a search."""

import numpy as np
import pandas as pd

from mezo_cli.report.details import thin_indices
from mezo_cli.report.figures import CURVE_POINTS, SHOWN_LABELS, extremes, histogram, short_count, shown_fractions


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    assert thin_indices(1000, 5).tolist() == [0, 250, 500, 749, 999]
    assert thin_indices(3, 5).tolist() == [0, 1, 2]
    assert thin_indices(0, 5).tolist() == []
    values = pd.Series(np.zeros(1000), index=np.arange(1, 2001, 2))
    values.iloc[[3, 777]] = 9.0, -9.0
    kept = extremes(values)
    assert len(kept) <= CURVE_POINTS
    assert (kept.max(), kept.min()) == (9.0, -9.0)
    assert kept.index.is_monotonic_increasing


def test_a_histogram_counts_every_value_once() -> None:
    values = np.geomspace(1e-3, 1e3, 193)
    counts, edges = histogram(values)
    assert counts.sum() == 193
    assert len(edges) == len(counts) + 1
    assert histogram(np.full(5, 2.0))[0].sum() == 5


def test_labels_that_are_seldom_predicted_are_counted_together() -> None:
    dev = [{"step": step, "predicted": {f"label {n}": n + 1 for n in range(9)}} for step in (0, 5)]
    shares = shown_fractions(dev)
    assert shares.shape == (2, SHOWN_LABELS)
    assert list(shares.columns[:1]) + list(shares.columns[-1:]) == ["label 8", "4 other labels"]
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)


def test_counts_are_short() -> None:
    assert [short_count(value) for value in (500, 20_000, 1.5e6, 2e9)] == ["500", "20k", "1.5M", "2B"]
