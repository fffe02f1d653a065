"""Say how a result stands to the untrained model: its scores, and a sentence. Reads summary.json alone."""

from collections.abc import Mapping
from typing import Any

from mezo_cli.config.schema import Config

BASELINES = {  # name in summary.json (objectives/comparison.py) -> in tables
    "label_shares": "threshold: label shares",
    "best_threshold": "threshold: best on train",
    "fitted_bias": "bias fitted on train",
}


def result_split(summary: Mapping[str, Any]) -> str:
    """Return the split of a run's result: test, or dev where there is no test split."""
    return "test" if summary.get("test") else "dev"


def baselines(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the scores of the untrained model with the bias between its labels removed, on the split of the result.

    By name; none for runs that have not computed them.
    """
    split, biases = result_split(summary), summary.get("baselines") or {}
    return {f"{split}, {BASELINES.get(name, name)}": one[split] for name, one in biases.items()}


def sentence(summary: Mapping[str, Any], config: Config) -> str:
    """Return what training has gained, and what of it removing a bias gives too; empty where that is not known.

    With metric=loss it is said of the task's metric: scores with a bias removed have no loss.
    """
    split, known, metric = result_split(summary), baselines(summary), config.shown_metric
    if not known or "difference" not in summary:
        return ""
    best = max(known.values(), key=lambda scores: config.order_of(metric) * float(scores[metric]))
    beyond = best["difference"]
    if metric not in beyond["intervals"]:  # of a single row
        return ""
    more = "nothing shows that it is more than"
    if all(config.better(metric, end, 0.0) for end in beyond["intervals"][metric]):
        more = "it is more than"
    elif all(config.better(metric, 0.0, end) for end in beyond["intervals"][metric]):
        more = "it is worse than"
    return (
        f"Training changes {split} by {_points(summary['difference'][split], metric)}. The untrained model has "
        f"{100 * best[metric]:.1f} once the bias between its labels is removed. The result is "
        f"{_points(beyond, metric)} from that: {more} a removed bias."
    )


def _points(difference: Mapping[str, Any], metric: str) -> str:
    low, high = difference["intervals"][metric]
    return f"{100 * difference[metric]:+.1f} points (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
