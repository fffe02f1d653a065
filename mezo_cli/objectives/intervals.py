"""95% intervals: Wilson's of an accuracy, Newcombe's of the difference of two on the same rows, else the bootstrap.

A row is the unit: what is predicted for one says nothing about another. The intervals tell how far a result may be from
that on all rows of the same kind; they say nothing about another seed of the training.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

Interval = tuple[float, float]
Score = Callable[[np.ndarray], np.ndarray]  # row numbers, [resamples, rows] -> the score of each resample, [resamples]

Z = 1.959963984540054  # the 97.5% quantile of the normal distribution
RESAMPLES = 2000
SEED = 20240817  # any number: the same rows give the same interval
CHUNK = 2**20  # row numbers that are drawn at once


def wilson(right: int, rows: int) -> Interval:
    """Return the score interval of a fraction (Wilson 1927; Newcombe 1998, Statistics in Medicine 17:857, method 3)."""
    fraction, scale = right / rows, 1 + Z * Z / rows
    middle = fraction + Z * Z / (2 * rows)
    half = Z * math.sqrt(fraction * (1 - fraction) / rows + (Z / (2 * rows)) ** 2)
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def paired_difference(before: np.ndarray, after: np.ndarray) -> Interval:
    """Return the interval of the accuracy after minus that before, on the same rows.

    Wilson's intervals of the two, squared and added with their correlation (Newcombe 1998, Statistics in Medicine
    17:2635, method 10).

    Args:
        before, after: whether each row was right, bool [rows].
    """
    rows, first, second = len(before), float(after.mean()), float(before.mean())
    low1, high1 = wilson(int(after.sum()), rows)
    low2, high2 = wilson(int(before.sum()), rows)
    both, neither = int((before & after).sum()), int((~before & ~after).sum())
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    spread = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    excess = both * neither - gained * lost
    excess_corrected = max(excess - rows / 2, 0.0) if excess > 0 else float(excess)  # continuity, as in the paper
    phi = excess_corrected / math.sqrt(spread) if spread else 0.0
    below, above = (first - low1, high2 - second), (high1 - first, second - low2)
    down, up = (math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b)) for a, b in (below, above))
    return first - second - down, first - second + up


def resample(scores: Mapping[str, Score], rows: int) -> dict[str, np.ndarray]:
    """Return the scores of `RESAMPLES` bootstrap samples of the rows, [RESAMPLES] each, all on the same samples."""
    generator, chunk = np.random.default_rng(SEED), max(1, min(RESAMPLES, CHUNK // rows))
    sampled: dict[str, list[np.ndarray]] = {name: [] for name in scores}
    for start in range(0, RESAMPLES, chunk):
        drawn = generator.integers(rows, size=(min(chunk, RESAMPLES - start), rows))
        for name, score in scores.items():
            sampled[name].append(score(drawn))
    return {name: np.concatenate(parts) for name, parts in sampled.items()}


def sample_mean(values: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the mean over each sample of the rows, given a value of each: row numbers [samples, rows] -> [samples]."""
    return np.asarray(values[samples].mean(axis=1))


def sample_ratio(sums: np.ndarray, numbers: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the ratio of two sums over each sample of the rows: row numbers [samples, rows] -> [samples]."""
    return np.asarray(sums[samples].sum(axis=1) / numbers[samples].sum(axis=1))


def percentile(resampled: np.ndarray) -> Interval:
    """Return the bootstrap's percentile interval (Efron and Tibshirani 1993, chapter 13)."""
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)
