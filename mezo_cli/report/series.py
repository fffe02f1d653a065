"""Prepare numbers for figures: smooth a curve, thin it to what a figure can show, count values in bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CURVE_POINTS = 240  # at most, in a figure
TABLE_ROWS = 24  # at most, in a table behind a figure
FEWEST = 10  # values that are smoothed at all
SMOOTHING = 20  # a smoothed point is the mean over about this share (1/20) of the curve


@dataclass(frozen=True)
class Curve:
    """A curve over steps, with a smoothed one.

    Attributes:
        steps: ascending.
        values: as they were logged.
        smooth: the mean of `window` neighbouring values at each step.
        window: an odd number; 1 where there are too few values to smooth.
    """

    steps: np.ndarray
    values: np.ndarray
    smooth: np.ndarray
    window: int


def smoothed(steps: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray) -> Curve:
    """Return a curve with its smoothed values: a centred mean, over the values that there are at both ends."""
    given = np.asarray(values, np.float64)
    half = max(len(given) // (2 * SMOOTHING), 1) if len(given) >= FEWEST else 0
    sums = np.concatenate([[0.0], np.cumsum(given)])
    at = np.arange(len(given))
    first, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(given))
    means = (sums[end] - sums[first]) / (end - first)
    return Curve(np.asarray(steps), given, means, 2 * half + 1)


def thin_indices(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced indices of `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) if count else np.zeros(0, int)


def extremes(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` indices that keep the range of a noisy curve: the least and the greatest of each part."""
    if len(values) <= most:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), most // 2)
    return np.unique([part[pick(values[part])] for part in parts for pick in (np.argmin, np.argmax)])


@dataclass(frozen=True)
class Histogram:
    """Counts of sizes (absolute values) in bins of equal width on a logarithmic scale; zeros are counted apart.

    Attributes:
        edges: the bounds of the bins, one more than there are counts.
        counts: how many values lie in each bin.
        zeros: how many values are exactly 0.
    """

    edges: np.ndarray
    counts: np.ndarray
    zeros: int

    @property
    def total(self) -> int:
        """The number of values, zeros included."""
        return int(self.counts.sum()) + self.zeros


def histogram(values: np.ndarray) -> Histogram:
    """Count the sizes of values: about sqrt(n) bins, from 6 to 30."""
    sizes = np.abs(values.astype(np.float64)).ravel()
    seen = sizes[sizes > 0]
    if not seen.size:
        return Histogram(np.zeros(1), np.zeros(0, int), len(sizes))
    low, high = float(seen.min()), float(seen.max())
    if high / low < 1.01:
        low, high = low / 1.1, high * 1.1
    edges = np.geomspace(low, high, min(30, max(6, math.isqrt(len(seen)))) + 1)
    edges[0], edges[-1] = low, high  # as rounding may put the ends inside
    return Histogram(edges, np.histogram(seen, edges)[0], len(sizes) - len(seen))
