"""What a trial of a search has reached, from the files of its run: for `mezo tune`, and for the page of a search."""

from collections.abc import Mapping
from typing import Any

from mezo_cli.runs import Run
from mezo_cli.training.verdict import DIVERGED, Evaluations

TIE = 1e-7  # of equal scores the one with the lower loss is higher by less than two of these


def trained_evaluations(run: Run, steps: int) -> Evaluations:
    """Return step -> the evaluation on dev of weights that the trial has trained: those after step 0.

    Args:
        run: the trial's run.
        steps: of its config; 0 for a linear probe alone, which is trained at step 0.
    """
    return {line["step"]: line for line in run.evaluations("dev") if line["step"] or not steps}


def value_of(line: Mapping[str, Any], metric: str, goal: str) -> float:
    """Return the one number by which evaluations are ordered; for the goal `score` the loss decides between equal ones.

    TIE is below the step of any score that is a fraction of fewer than 5 million rows: the loss decides only ties.
    """
    loss = float(line["loss"])
    return loss if goal == "loss" else float(line[metric]) - TIE * loss / (1 + abs(loss))


def best_evaluation(run: Run, steps: int, metric: str, goal: str) -> Mapping[str, Any] | None:
    """Return the best evaluation of trained weights, of equal ones the first; None if there is none yet."""
    sign = -1 if goal == "loss" else 1
    evaluations = trained_evaluations(run, steps).values()
    return max(evaluations, key=lambda line: sign * value_of(line, metric, goal), default=None)


def end_of(run: Run) -> str:
    """Return `diverged`, `pruned`, or else the run's status: `finished`, `failed`, `interrupted`, `running`."""
    status = run.status()
    files = run.read_summary() if status == "finished" else run.info()
    if status in ("finished", "failed") and files.get("verdict") == DIVERGED:
        return DIVERGED
    return "pruned" if status == "finished" and files.get("stopped") == "pruned" else status
