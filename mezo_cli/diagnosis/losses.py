"""Measure losses at theta + eps z and theta - eps z: along several directions, for several eps and compute dtypes.

What is measured is planned in the order of its importance and measured until the time is up, so that a slow machine
answers the first questions too: is the signal resolved at the run's own eps, which learning rate suits, what would
another eps do.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from mezo_cli.diagnosis.findings import Deadline
from mezo_cli.models.loading import DTYPES
from mezo_cli.optim import LossFn
from mezo_cli.training.precision import measure_losses
from mezo_cli.training.session import Session

EPS = (1e-4, 1e-3, 1e-2)
DIRECTIONS = 32  # for the learning rate, which needs most of them
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


Losses = Mapping[Point, tuple[float, float]]  # loss_plus, loss_minus; twice the same at theta itself


def batches_of(direction: int, whole: bool) -> tuple[int, int]:
    """Return the two independent batches of a direction; with `whole` every batch has all rows."""
    return (0, 0) if whole else (2 * direction, 2 * direction + 1)


def plan_points(eps: float, dtype: str, whole: bool) -> Iterator[Point]:
    """Yield what to measure, the most important first; a point may come twice.

    The first directions are measured in every way: at the run's own eps, for the learning rate, at other eps, in the
    dtype that is not the run's. The others serve the learning rate alone.

    Args:
        eps: the run's.
        dtype: the run's compute dtype.
        whole: a batch has all rows.
    """

    def pairs(some: range, all_eps: Iterable[float], dtypes: Iterable[str]) -> Iterator[Point]:
        yield from (Point(k, batches_of(k, whole)[0], e, d) for k in some for e in all_eps for d in dtypes)

    def curvature(some: range) -> Iterator[Point]:
        for k in some:
            for batch in batches_of(k, whole):
                yield from (Point(k, batch, eps, "float32"), Point(-1, batch, 0.0, "float32"))

    own = dict.fromkeys(("float32", dtype))
    for start in range(0, FIRST, ROUND):
        some = range(start, start + ROUND)
        yield from pairs(some, (eps,), own)
        yield from curvature(some)
        yield from pairs(some, EPS, own)
        yield from pairs(some, (eps, *EPS), DTYPES)
    yield from curvature(range(FIRST, DIRECTIONS))


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
    losses: dict[Point, tuple[float, float]] = {}
    taken: dict[tuple[bool, str], float] = {}  # (a single loss or a pair, dtype) -> seconds
    for point in points:
        way = point.direction < 0, point.dtype
        if point in losses:
            continue
        if losses and not deadline.allows(taken.get(way, 0.0)):
            break
        start = time.perf_counter()
        losses[point] = _measure(session, loss_of(point.batch), point)
        seconds = time.perf_counter() - start
        taken[way] = min(seconds, taken.get(way, seconds))
    return losses


@torch.no_grad()
def _measure(session: Session, loss_fn: LossFn, point: Point) -> tuple[float, float]:
    if point.direction < 0:
        with session.forward.using_compute_dtype(DTYPES[point.dtype]):
            loss = float(loss_fn())
        return loss, loss
    return measure_losses(session, loss_fn, point.direction, point.eps, DTYPES[point.dtype])[:2]


def projected_grads(losses: Losses, *ways: tuple[float, str]) -> list[list[float]]:
    """Return g of the directions that are measured in all of some ways (eps, dtype): a list for each way.

    Only the first batch of a direction counts, so that all lists are of the same directions and batches.
    """
    eps, dtype = ways[0]
    grads: list[list[float]] = [[] for _ in ways]
    for point in losses:
        points = [point._replace(eps=e, dtype=d) for e, d in ways]
        is_first = (point.eps, point.dtype) == (eps, dtype) and 0 <= point.batch <= 2 * point.direction
        if is_first and all(point in losses for point in points):
            for values, point in zip(grads, points, strict=True):
                plus, minus = losses[point]
                values.append((plus - minus) / (2 * point.eps))
    return grads
