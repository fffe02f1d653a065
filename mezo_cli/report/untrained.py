"""Say how a result stands to the untrained model: lines for tables, and a sentence. Reads summary.json alone."""

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from mezo_cli import console
from mezo_cli.config.schema import Config
from mezo_cli.report.settings import format_score
from mezo_cli.runs.scores import MARK, picked_start

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


def interval(scores: Mapping[str, Any], metric: str, form: Callable[[str, float], str] = format_score) -> str:
    """Return the 95% interval of a score, `65.4 to 73.9`, its ends written by `form`; empty for a run that has none."""
    ends = (scores.get("intervals") or {}).get(metric)
    return "" if ends is None else " to ".join(form(metric, end) for end in ends)


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


def closing(summary: Mapping[str, Any], first: Mapping[str, Any], config: Config) -> list[str]:
    """Return the last lines of a run: scores before training and at the best step, baselines, and `sentence`.

    Args:
        summary: of the run.
        first: the fields of its first evaluation on dev.
        config: of the run.
    """
    metric, best, mark = config.chosen_metric, summary["best"]["step"], f"  {MARK}" if picked_start(summary) else ""
    rows = [("dev before training", first, 0), ("dev best", summary["dev"], best)]
    rows += [("test before training", summary.get("test_before"), 0)]
    rows += [(name, scores, 0) for name, scores in baselines(summary).items()]
    rows += [("test at best", summary["test"], best)]
    others = [name for name in dict.fromkeys((config.shown_metric, "accuracy", "loss")) if name in first]
    if first["loss"] == -first[metric]:  # a reward and its mirror image
        others.remove("loss")
    widths = {score: 6 if score == "loss" else 8 for score in dict.fromkeys((metric, *others))}
    heads = "  ".join(f"{score:>{columns}}" for score, columns in widths.items())
    width = max(len(name) for name, scores, _ in rows if scores is not None)
    lines = [f"{'':{width}}  {heads}  at step  95% interval"]
    for name, scores, step in rows:
        if scores is not None:
            values = {score: console.format_score(score, scores[score]) if score in scores else "" for score in widths}
            cells = "  ".join(f"{value:>{widths[score]}}" for score, value in values.items())
            line = f"{name:{width}}  {cells}  {step:7d}  {interval(scores, metric, _without_sign)}"
            lines.append(line.rstrip() + (mark if name in ("dev best", "test at best") else ""))
    return lines + textwrap.wrap(sentence(summary, config), 100)


def _without_sign(metric: str, value: float) -> str:
    return console.format_score(metric, value).rstrip("%")


def _points(difference: Mapping[str, Any], metric: str) -> str:
    low, high = difference["intervals"][metric]
    return f"{100 * difference[metric]:+.1f} points (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
