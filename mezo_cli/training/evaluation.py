"""The evaluations of a run on dev: which there are, and which is the best."""

from collections.abc import Mapping, Sequence
from typing import Any

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError
from mezo_cli.runs import Run


def dev_evaluations(
    config: Config, run: Run, lines: Sequence[Mapping[str, Any]], stop: int
) -> dict[int, Mapping[str, Any]]:
    """Return step -> line of every evaluation on dev among the lines of metrics.jsonl.

    Raises:
        UserError: when an evaluation that was due before step `stop` is missing.
    """
    evaluations = {line["step"]: line for line in lines if line["kind"] == "eval" and line["split"] == "dev"}
    for step in range(stop):
        if config.evaluates_at(step) and step not in evaluations:
            raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: it lacks the evaluation of step {step}")
    return evaluations


def best_step(config: Config, evaluations: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the step with the best value of the metric that the run is judged by; of equal ones the earliest."""
    metric = config.chosen_metric
    return max(evaluations, key=lambda step: (config.order_of(metric) * evaluations[step][metric], -step))
