"""Evaluations as metrics.jsonl and summary.json have them: their metrics; whether training helped at all."""

from collections.abc import Mapping
from typing import Any

MARK = "@0"  # beside the score of a run whose training did not help: it is the score of step 0
NOTE = f"{MARK}: step 0 was picked, the model before training: none was better on dev"
OTHERS = ("step", "seconds", "rows", "row", "drift", "keep_log_prob", "keep_kl")  # numbers that are no metrics


def picked_start(summary: Mapping[str, Any]) -> bool:
    """Return whether a run took steps and its best evaluation is nevertheless that of step 0.

    Args:
        summary: summary.json, of any version; empty for a run that has not finished.
    """
    return bool(summary.get("steps")) and (summary.get("best") or {}).get("step") == 0


def metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics and the loss among the fields of an evaluation."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name not in OTHERS}
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, bool)}
