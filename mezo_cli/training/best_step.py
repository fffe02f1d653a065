"""The evaluations of a run on dev, and the step with the best of them."""

from collections.abc import Mapping
from typing import Any

from mezo_cli.config.schema import Config
from mezo_cli.training.verdict import best_step


class BestStep:
    """The evaluations on dev so far, and the step of the best by the metric that the run is judged by.

    Attributes:
        evaluations: step -> the fields of the evaluation's line in metrics.jsonl.
        step: of the best; of equal ones as `verdict.best_step` says.
        since: how many evaluations came after it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.evaluations: dict[int, Mapping[str, Any]] = {}
        self.step, self.since = 0, 0

    def add(self, evaluations: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the evaluations of some steps."""
        self.evaluations |= evaluations
        if self.evaluations:
            self.step = best_step(self._config, self.evaluations)
            self.since = sum(step > self.step for step in self.evaluations)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether `patience` evaluations have not been better."""
        return self._config.patience is not None and self.since >= self._config.patience
