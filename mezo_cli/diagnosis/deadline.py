"""The time that is left for the checks."""

import time
from collections.abc import Callable


class Deadline:
    """A time limit, and limits for parts of it.

    Args:
        seconds: from now on.
        clock: returns seconds; of a test.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - self._clock())

    def allows(self, seconds: float) -> bool:
        """Return whether work that takes so long would end in time; never once the time is up."""
        return self.left > 0 and self.left >= seconds

    def part(self, share: float) -> "Deadline":
        """Return a deadline for a share of the time that is left."""
        return Deadline(share * self.left, self._clock)
