"""The verdict: whether the picked step is better than the untrained model, by the interval of their difference.

It follows from the files of a run, so a resumed run has that of a run that was never stopped.
"""

from collections.abc import Mapping
from typing import Any

from mezo_cli.config.schema import Config
from mezo_cli.runs import Run
from mezo_cli.runs.scores import format_difference, format_score

TIE = 1e-7  # of equal scores the one with the lower loss is better by less than two of these
IMPROVED, WITHIN_NOISE, WORSE = "improved", "within_noise", "worse"
NOT_IMPROVED, DIVERGED, NOT_COMPARED = "not_improved", "diverged", "not_compared"
LEAST_ROWS = 10  # of a comparison


def judge_difference(
    config: Config,
    split: str,
    step: int,
    rows: int,
    values: tuple[float, float],
    difference: Mapping[str, Any],
    repeatable: bool = True,
) -> tuple[str, str]:
    """Return the verdict on weights that nothing about the rows compared has picked, and the figures behind it.

    Args:
        config: of the run.
        split: of the rows: test, at the picked step; or dev, at the last evaluation.
        step: of the weights, later than 0.
        rows: their number.
        values: the metric of the untrained model, and of these weights.
        difference: of the two by metric, with `intervals` (`Evaluation.summary`).
        repeatable: whether the reward gave the same numbers when it was called again.
    """
    metric = config.chosen_metric
    if rows < LEAST_ROWS:
        return NOT_COMPARED, f"{split} has {rows} rows, and a comparison needs {LEAST_ROWS}"
    interval = difference["intervals"].get(metric)
    if interval is None:
        return NOT_COMPARED, f"the objective gives no interval of {metric}"
    improved = all(config.better(metric, end, 0.0) for end in interval)
    worse = all(config.better(metric, 0.0, end) for end in interval)
    before, after = (format_score(metric, value, "%") for value in values)
    change = format_difference(metric, difference)
    text = f"{split} {metric} {before} before training, {after} at step {step}: {change}"
    if improved and not repeatable:
        return WITHIN_NOISE, f"{text}, but the reward gave other numbers when it was called again"
    if improved or worse:
        return IMPROVED if improved else WORSE, text
    return WITHIN_NOISE, f"{text}, which has 0 in it"


# --- the trials of `mezo tune` ---


def trained_evaluations(run: Run, steps: int) -> dict[int, dict[str, Any]]:
    """Return step -> the line of an evaluation on dev of weights that the trial has trained: those after step 0.

    Args:
        run: the trial's run.
        steps: of its config; 0 for a linear probe alone, which is trained at step 0.
    """
    return {line["step"]: line for line in run.evaluations("dev") if line["step"] or not steps}


def value_of(line: Mapping[str, Any], config: Config) -> float:
    """Return the one number by which evaluations are ordered; the loss decides between equal scores.

    TIE is below the step of any score that is a fraction of fewer than 5 million rows: the loss decides only ties.
    """
    metric, loss = config.chosen_metric, float(line["loss"])
    tie = 0.0 if metric == "loss" else TIE * loss / (1 + abs(loss))
    return float(line[metric]) - config.order_of(metric) * tie


def end_of(run: Run) -> str:
    """Return `diverged`, `pruned`, or else the run's status: `finished`, `failed`, `interrupted`, `running`."""
    status = run.status()
    files = run.read_summary() if status == "finished" else run.info()
    if status in ("finished", "failed") and files.get("verdict") == DIVERGED:
        return DIVERGED
    return status
