"""Evaluations as metrics.jsonl and summary.json have them: their metrics; whether training helped at all."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mezo_cli.config.registry import METRICS

MARK = "@0"  # beside the score of a run whose training did not help: it is the score of step 0
NOTE = f"{MARK}: step 0 was picked, the model before training: none was better on dev"
# Fields of a record that show rows of the data, or what the model made of them.
TEXTS = ("columns", "prompt", "completion", "completions", "golds", "candidates", "prediction", "right")
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


def without_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's record without texts: its label, what was predicted, probabilities and figures."""
    return {name: value for name, value in record.items() if name not in TEXTS}


@cache
def is_fraction(metric: str) -> bool:
    """Return whether a metric is shown in percent: those of labels are; a reward has a scale of its own."""
    return metric in METRICS.names


def scale(metric: str) -> int:
    """Return by what a metric's values are multiplied to be shown."""
    return 100 if is_fraction(metric) else 1


def format_score(metric: str, value: float, sign: str = "") -> str:
    """Return a score in percent, with the `sign` behind it, or as it is; a loss with four digits."""
    if metric == "loss":
        return f"{value:.4f}" if abs(value) >= 0.00005 else "0.0000"  # never -0.0000
    return f"{100 * value + 0:.1f}{sign}" if is_fraction(metric) else f"{value + 0:.4g}"  # + 0: -0.0 is 0


def format_difference(metric: str, scores: Mapping[str, Any]) -> str:
    """Return a difference of scores with its interval: `+12.3 points (95% interval +6.2 to +18.2)`."""
    digits = 1 if is_fraction(metric) else 4 if metric == "loss" else 3
    numbers = (scores[metric], *scores["intervals"][metric])
    value, low, high = (f"{scale(metric) * number:+.{digits}f}" for number in numbers)
    return f"{value}{' points' if is_fraction(metric) else ''} (95% interval {low} to {high})"
