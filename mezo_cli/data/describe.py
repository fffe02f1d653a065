"""Count the rows and words of the splits, for `mezo data`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mezo_cli.config.schema import Example, Splits, TaskConfig


def describe(splits: Splits, task: TaskConfig) -> dict[str, Any]:
    """Return the number of rows, rows per label, and words per row of each split.

    The result is `{"train" | "dev" | "test": {"rows": int, "labels": {label: rows}, "words": {"min", "median", "p95",
    "max"}}}`; "test" is None if there is none. A word is a part between white space; the words of all texts of a row
    are counted together.
    """
    return {
        "train": _describe_split(splits.train, task),
        "dev": _describe_split(splits.dev, task),
        "test": None if splits.test is None else _describe_split(splits.test, task),
    }


def _describe_split(examples: Sequence[Example], task: TaskConfig) -> dict[str, Any]:
    counts = Counter(example.label for example in examples)
    lengths = [sum(len(text.split()) for text in example.texts) for example in examples] or [0]
    return {
        "rows": len(examples),
        "labels": {label: counts[i] for i, label in enumerate(task.labels)},
        "words": describe_lengths(lengths),
    }


def describe_lengths(lengths: Sequence[int]) -> dict[str, float]:
    """Return the minimum, median, 95th percentile and maximum of one or more lengths."""
    return {
        "min": min(lengths),
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "max": max(lengths),
    }
