"""Count the rows and words of the splits, and the rows that two splits share: scores on these are too good."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mezo_cli.config.schema import Example, Splits, TaskConfig


def describe(splits: Splits, task: TaskConfig) -> dict[str, Any]:
    """Return the number of rows, rows per label, and words per row of each split that there is.

    The result is `{"train" | "dev" | "test": {"rows": int, "labels": {label: rows}, "words": {"min", "median", "p95",
    "max"}}}`. A word is a part between white space; the words of all texts of a row are counted together.
    """
    described = {}
    for name, examples in (("train", splits.train), ("dev", splits.dev), ("test", splits.test)):
        if examples is not None:
            counts = Counter(example.label for example in examples)
            labels = {label: counts[i] for i, label in enumerate(task.labels)}
            lengths = [sum(len(text.split()) for text in example.texts) for example in examples] or [0]
            described[name] = {"rows": len(examples), "labels": labels, "words": describe_lengths(lengths)}
    return described


def describe_lengths(lengths: Sequence[int]) -> dict[str, float]:
    """Return the minimum, median, 95th percentile and maximum of one or more lengths."""
    median, p95 = float(np.median(lengths)), float(np.percentile(lengths, 95))
    return {"min": min(lengths), "median": median, "p95": p95, "max": max(lengths)}


def row_key(example: Example) -> tuple[str, ...]:
    """Return what two rows with the same texts have in common: case and white space do not count."""
    return tuple(" ".join(text.split()).casefold() for text in example.texts)


def shared_rows(named: Mapping[str, Sequence[Example]]) -> dict[tuple[str, str], int]:
    """Return (first split, other split) -> the rows of the other that are also in the first, of those there are."""
    keys = {split: {row_key(example) for example in examples} for split, examples in named.items()}
    pairs = [pair for pair in (("train", "dev"), ("train", "test"), ("dev", "test")) if pair[1] in named]
    return {(first, other): sum(row_key(row) in keys[first] for row in named[other]) for first, other in pairs}
