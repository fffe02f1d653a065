"""Numbers for figures: thinning, counting, labels, trials of a search."""

import numpy as np
import pandas as pd

from mezo_cli.report.document import thin_indices
from mezo_cli.report.figures import CURVE_POINTS, extremes


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
