"""Whether a run has diverged: a number of a step is not finite, or its losses lie far above the lowest it has had."""

import statistics
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.rates import advise
from mezo_cli.config.schema import Config
from mezo_cli.console import log
from mezo_cli.errors import RunFailed
from mezo_cli.optim import StepResult, not_finite
from mezo_cli.runs import Run

DIVERGED = "diverged"  # the verdict
WINDOW = 10  # logged losses whose means are compared
FACTOR, FLOOR = 3.0, 0.1


@dataclass
class Divergence:
    """Whether a run has diverged, as far as its logged training losses say. A loss takes constant time.

    It has while the mean of the last 10 exceeds the smallest mean of 10 before by more than 3 max(|mean|, std, 0.1),
    mean and population std of the first 10. Which losses are logged depends on `log_every`, which is part of a run: so
    a resumed run is judged as one that was never stopped.

    Attributes:
        reason: why the run has diverged, for the log; None if it has not.
        was_told: whether the log has a warning of it; a resumed run repeats none.
    """

    reason: str | None = None
    was_told: bool = False
    _last: deque[float] = field(default_factory=partial(deque, maxlen=WINDOW))
    _lowest: float | None = None  # mean of 10 so far
    _rise: float = 0.0  # that is allowed

    def add(self, loss: float) -> None:
        """Add the next logged loss."""
        self._last.append(loss)
        if len(self._last) < WINDOW:
            return
        mean = statistics.fmean(self._last)
        if self._lowest is None:
            self._lowest, self._rise = mean, FACTOR * max(abs(mean), statistics.pstdev(self._last), FLOOR)
        diverged = mean - self._lowest > self._rise
        means = f"the mean of the last {WINDOW} losses is {mean:.4g}, the smallest before {self._lowest:.4g}"
        self.reason = means if diverged else None
        self._lowest = min(self._lowest, mean)

    def warn(self, config: Config, run: Run, step: int) -> None:
        """Say once that the run has diverged."""
        if self.reason is not None and not self.was_told:
            self.was_told = True
            log.warning("warning: step %d: the run has diverged: %s; %s", step, self.reason, lower_rate(config, run))


def check_finite(config: Config, run: Run, step: int, result: StepResult) -> None:
    """Check that all numbers of a step (from 1) are finite, before any of them is written."""
    wrong, optimizer = not_finite(result), config.optimizer
    if wrong:
        run.update(verdict=DIVERGED)
        other = ""
        if isinstance(optimizer, PerturbationConfig):
            other = f" or another optimizer.eps (now {optimizer.eps:g})"
        advice = f"{lower_rate(config, run, other)}{config.model.wider_range}"
        raise RunFailed(f"step {step}: the loss is not finite ({wrong}); {advice}")


def lower_rate(config: Config, run: Run, other: str = "") -> str:
    """Return the advice for a run that has diverged, with the rate that runs like it begin with."""
    trained, lr, usual = run.info()["trainable"], config.optimizer.lr, ""
    if config.optimizer.name == "mezo":
        usual = advise(round(trained["count"] / trained["share"]), config.peft.name, below=lr)
    return f"try a lower optimizer.lr, {lr / 3:.1g} (now {lr:g}){other}{usual}"
