"""Measure losses at theta + eps z and theta - eps z: along several directions, for several eps and compute dtypes.

What is measured is planned in the order of its importance and measured until the time is up, so that a slow machine
answers the first questions too: is the signal resolved at the run's own eps, which learning rate suits, what would
another eps do.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.models.loading import DTYPES
from mezo_cli.optim import LossFn
from mezo_cli.training.precision import measure_losses
from mezo_cli.training.session import Session

EPS = (1e-4, 1e-3, 1e-2)
DIRECTIONS = 32
FIRST, ROUND = 8, 4  # directions that are measured in every way, so many at a time


class Point(NamedTuple):
    """What is measured: the losses of a batch along a direction.

    Attributes:
        direction: the step whose z is taken; -1 at theta itself.
        batch: the step whose batch is taken.
        eps: 0 at theta itself.
        dtype: the compute dtype.
    """

    direction: int
    batch: int
    eps: float
    dtype: str

    @property
    def kind(self) -> tuple[bool, str]:
        """What takes the same time: a pair of losses or a single one, in a dtype."""
        return self.direction < 0, self.dtype


Losses = Mapping[Point, tuple[float, float]]  # loss_plus, loss_minus; twice the same at theta itself


def batches_of(direction: int, whole: bool) -> tuple[int, int]:
    """Return the two independent batches of a direction; with `whole` every batch has all rows."""
    return (0, 0) if whole else (2 * direction, 2 * direction + 1)


def plan_points(eps: float, dtype: str, whole: bool, directions: int = DIRECTIONS) -> Iterator[Point]:
    """Yield what to measure, the most important first; a point may come twice.

    The first directions are measured in every way: at the run's own eps, for the learning rate, at other eps, in the
    dtype that is not the run's. The others serve the learning rate first, which needs most of them.

    Args:
        eps: the run's.
        dtype: the run's compute dtype.
        whole: a batch has all rows.
        directions: the most that are measured.
    """
    first, own = min(FIRST, directions), dict.fromkeys(("float32", dtype))
    for start in range(0, first, ROUND):
        some = range(start, min(start + ROUND, first))
        yield from _precision_points(some, (eps,), own, whole)
        yield from _learning_rate_points(some, eps, whole)
        yield from _precision_points(some, EPS, own, whole)
        yield from _precision_points(some, (eps, *EPS), DTYPES, whole)
    others = range(first, directions)
    yield from _learning_rate_points(others, eps, whole)
    yield from _precision_points(others, (eps, *EPS), DTYPES, whole)


def _precision_points(
    directions: Iterable[int], all_eps: Sequence[float], dtypes: Iterable[str], whole: bool
) -> Iterator[Point]:
    for k in directions:
        for eps in all_eps:
            for dtype in dtypes:
                yield Point(k, batches_of(k, whole)[0], eps, dtype)


def _learning_rate_points(directions: Iterable[int], eps: float, whole: bool) -> Iterator[Point]:
    for k in directions:
        for batch in batches_of(k, whole):
            yield Point(k, batch, eps, "float32")
            yield Point(-1, batch, 0.0, "float32")


def measure(
    session: Session, loss_of: Callable[[int], LossFn], points: Iterator[Point], deadline: Deadline
) -> dict[Point, tuple[float, float]]:
    """Measure points in order while there is time for the next one.

    Args:
        session: theta and the compute dtype stay as they are.
        loss_of: step -> the loss of its batch.
        points: the first one is always measured.
        deadline: the time for it.
    """
    found: dict[Point, tuple[float, float]] = {}
    taken: dict[tuple[bool, str], float] = {}
    for point in points:
        if point in found:
            continue
        if found and not deadline.allows(taken.get(point.kind, 0.0)):
            break
        start = time.perf_counter()
        found[point] = _measure(session, loss_of(point.batch), point)
        seconds = time.perf_counter() - start
        taken[point.kind] = min(seconds, taken.get(point.kind, seconds))
    return found


def projected_grads(losses: Losses, eps: float, dtype: str, others: Sequence[tuple[float, str]]) -> list[list[float]]:
    """Return g of the directions that are measured for (eps, dtype) and for each of `others`: a list for each of them.

    Only the first batch of a direction counts, so that all lists are of the same directions and batches.
    """
    wanted = [(eps, dtype), *others]
    grads: list[list[float]] = [[] for _ in wanted]
    for point in losses:
        if (point.eps, point.dtype) != wanted[0] or point.batch > 2 * point.direction:
            continue
        points = [point._replace(eps=e, dtype=d) for e, d in wanted]
        if all(one in losses for one in points):
            for values, one in zip(grads, points, strict=True):
                plus, minus = losses[one]
                values.append((plus - minus) / (2 * one.eps))
    return grads


@torch.no_grad()
def _measure(session: Session, loss_fn: LossFn, point: Point) -> tuple[float, float]:
    if point.direction < 0:
        with session.forward.using_compute_dtype(DTYPES[point.dtype]):
            loss = float(loss_fn())
        return loss, loss
    return measure_losses(session, loss_fn, point.direction, point.eps, DTYPES[point.dtype])[:2]
