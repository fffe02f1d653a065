"""Figures about the splits, for `mezo data`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mezo_cli.schema import Example, Splits, TaskConfig


def describe(splits: Splits, task: TaskConfig) -> dict[str, Any]:
    """Count rows and lengths.

    Returns `{"train" | "dev" | "test": {"rows": int, "labels": {label: rows}, "words": {"min", "median", "p95",
    "max"}}}`; "test" is None when there is none. Lengths are in words (parts between white space) of all of a row's
    texts together.
    """
    return {
        "train": _figures(splits.train, task),
        "dev": _figures(splits.dev, task),
        "test": None if splits.test is None else _figures(splits.test, task),
    }


def _figures(examples: Sequence[Example], task: TaskConfig) -> dict[str, Any]:
    counts = Counter(example.label for example in examples)
    lengths = [sum(len(text.split()) for text in example.texts) for example in examples] or [0]
    return {
        "rows": len(examples),
        "labels": {label: counts[i] for i, label in enumerate(task.labels)},
        "words": {
            "min": min(lengths),
            "median": float(np.median(lengths)),
            "p95": float(np.percentile(lengths, 95)),
            "max": max(lengths),
        },
    }
