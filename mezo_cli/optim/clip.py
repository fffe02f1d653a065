"""A bound on the size of projected gradients: a number, or a running quantile of their sizes.

    g <- max(-b, min(b, g)),   b = NUMBER,   or for `q0.99` the 0.99 quantile of the last `clip_window` raw |g|

The quantile is the ceil(q n)-th smallest of the n values that the steps before left, raw, at most `clip_window`; the
first step is not clipped. So b is a function of the trajectory, which stores the raw g: a step, a resumed run and a
replay compute the same.
"""

import math
from collections import deque
from collections.abc import Iterable


class Clip:
    """Clip the projected gradients of a run, step by step.

    Args:
        bound: a number or a quantile, as `ClipBound` has it; None: never clip.
        window: the number of raw |g| of which the quantile is taken.
    """

    def __init__(self, bound: str | None, window: int) -> None:
        self._quantile = float(bound[1:]) if bound is not None and bound.startswith("q") else None
        self._limit = float(bound) if bound is not None and self._quantile is None else math.inf
        self._past = deque[float](maxlen=window)
        self._step: int | None = None  # the last one, whose |g| are in `_past`

    def clip(self, step: int, grads: list[float]) -> list[float]:
        """Return a step's g, clipped. Steps must come in order; the last one may be repeated."""
        if self._quantile is not None and step != self._step:
            self._step = step
            if self._past:
                self._limit = sorted(self._past)[math.ceil(self._quantile * len(self._past)) - 1]
            self._past.extend(map(abs, grads))
        return [max(-self._limit, min(self._limit, g)) for g in grads]

    @property
    def past(self) -> list[float]:
        """The raw |g| of which the next quantile is taken; empty without a quantile."""
        return list(self._past)

    def restore(self, past: Iterable[float]) -> None:
        """Take over what `past` returned."""
        self._past.clear()
        self._past.extend(past)
        self._step = None
