"""Whether a run has diverged: its newest training losses lie far above the lowest that it has had."""

import statistics
from collections import deque

WINDOW = 10  # logged losses whose means are compared
FACTOR, FLOOR = 3.0, 0.1


class Divergence:
    """Whether a run has diverged, as far as its logged training losses say. A loss takes constant time.

    It has while the mean of the last 10 exceeds the smallest mean of 10 before by more than 3 max(|mean|, std, 0.1),
    mean and population std of the first 10. Which losses are logged depends on `log_every`, which is part of a run: so
    a resumed run is judged as one that was never stopped.

    Attributes:
        reason: why the run has diverged, for the log; None if it has not.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._lowest: float | None = None  # mean of 10 so far
        self._rise = 0.0  # that is allowed
        self.reason: str | None = None

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
