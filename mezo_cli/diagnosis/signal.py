"""Check the signal: is the difference of the two losses resolved, at which eps, and which learning rate suits it.

The losses at theta + eps z and theta - eps z are measured along several directions, for several eps and compute dtypes,
in the order of their importance and until the time is up, so that a slow machine answers the first questions too: is
the signal resolved at the run's own eps, which learning rate suits, what would another eps do.

Of rewards, which have no derivative: do members of one step differ in them, on how many rows, and are completions cut.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.data.sampling import make_sampler
from mezo_cli.diagnosis import learning_rate
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Section, count, percent
from mezo_cli.diagnosis.learning_rate import FLOAT32_STEP, PAPER_EPS
from mezo_cli.models.loading import DTYPES, worth_measuring
from mezo_cli.models.quantized import count_parameters
from mezo_cli.objectives.generation import Generation
from mezo_cli.objectives.settings import GenerateConfig
from mezo_cli.optim import LossFn
from mezo_cli.optim.mezo import spsa
from mezo_cli.perturb.noise import Direction
from mezo_cli.session.opening import Prepared
from mezo_cli.training.precision import EPS, MAX_OFF, MAX_RELATIVE_ERROR, Agreement, agreement, describe_exact

DIRECTIONS = 32  # for the learning rate, which needs most of them
FIRST, ROUND = 16, 4  # directions that are measured in every way, so many at a time
MAX_ZEROS = 0.1
FLOAT32_NOISE = 0.05  # of mean |g|; an eps at which float32 is worse does not serve as the slope
COMPARED = 2  # directions in which the run's own eps is compared with another one
MEMBERS, REWARDED_ROWS = 8, 16
AGREEING = 0.9  # of the rows, on which all members have the same reward
TRUNCATED = 0.5  # of the completions
HEADER = ("eps", "dtype", "corr.", "error", "zeros", "off derivative", "directions")


class Point(NamedTuple):
    """What is measured: the losses of a batch along a direction."""

    direction: int  # the step whose z is taken; -1 at theta itself
    batch: int  # the step whose batch is taken
    eps: float  # 0 at theta itself
    dtype: str  # in which it is computed


Losses = Mapping[Point, tuple[float, float]]  # loss_plus, loss_minus; twice the same at theta itself
Row = tuple[float, str, Agreement, float]  # eps, dtype, agreement with float32 at that eps, error against the slope


def check(prepared: Prepared, deadline: Deadline) -> Section:
    """Measure the signal of the run's first directions and batches; theta is not changed."""
    section, session, config = Section("signal"), prepared.session, prepared.session.config
    if config.steps == 0:
        section.add(OK, "not_needed", "steps=0: no step is taken, so there is no projected gradient to check")
        return section
    if not session.optimizer.replayable:
        text = f"optimizer={config.optimizer.name} backpropagates: there is no projected gradient, and no lr is judged"
        section.add(UNKNOWN, "not_needed", text)
        return section
    eps, dtype = zeroth_order(config.optimizer).eps, config.model.computes_in
    whole = prepared.sampler.takes_all_rows
    losses = measure(prepared, plan_points(eps, dtype, whole, worth_measuring(session.loaded.device, dtype)), deadline)
    rows = compare(losses, eps)
    if not all(math.isfinite(loss) for pair in losses.values() for loss in pair):
        advice = f"use a smaller optimizer.eps, or model.compute_dtype=float32{config.model.wider_range}"
        section.add(DOUBT, "finite", "a loss at theta +- eps z is not finite", advice)
        return section
    noise = rounding(losses, eps)
    better = judge_resolution(section, rows, eps, dtype, noise, describe_exact(session))
    if (agreed := next((row[2] for row in rows if row[:2] == (eps, dtype)), None)) is not None:
        ways = "use a larger optimizer.eps, or model.compute_dtype=float32"
        if not config.objective.is_differentiable:
            loss = f"objective.loss={config.objective.loss} is constant almost everywhere"
            ways = f"{loss}; use cross_entropy, a larger batch_size or eps"
        zeros = percent(agreed.zeros) if agreed.zeros else "none"
        text = f"g is exactly 0 in {zeros} of {count(agreed.directions, 'direction')}"
        advice, figures = f"a step with g = 0 changes nothing: {ways}", {"directions": agreed.directions}
        section.judge("zeros", agreed.zeros > MAX_ZEROS, text, advice, zeros=agreed.zeros, **figures)
    estimated = learning_rate.estimate(whole_directions(losses, eps, whole), eps)
    larger_eps = max(better, PAPER_EPS) if hides(noise) else None
    learning_rate.judge(section, estimated, config, larger_eps, count_parameters(session.loaded.model))
    return section


def batches_of(direction: int, whole: bool) -> tuple[int, int]:
    """Return the two independent batches of a direction; with `whole` every batch has all rows."""
    return (0, 0) if whole else (2 * direction, 2 * direction + 1)


def plan_points(
    eps: float, dtype: str, whole: bool, dtypes: Sequence[str] = ("float32", "bfloat16")
) -> Iterator[Point]:
    """Yield what to measure, the most important first; a point may come twice.

    The first directions are measured in every way: at the run's own eps, for the learning rate, at other eps, in the
    dtype that is not the run's. The others serve the learning rate alone.
    `whole`: a batch has all rows.
    """
    of_run, sizes = dict.fromkeys(("float32", dtype)), dict.fromkeys((eps, *EPS))
    for start in range(0, DIRECTIONS, ROUND):
        of_round = [(k, *batches_of(k, whole)) for k in range(start, start + ROUND)]
        if start < FIRST:
            yield from (Point(k, batch, eps, one) for k, batch, _ in of_round for one in of_run)
        for k, *batches in of_round:
            for batch in batches:
                yield Point(k, batch, eps, "float32")
                yield Point(-1, batch, 0.0, "float32")
        for compared in (of_run, dtypes) if start < FIRST else ():
            yield from (Point(k, batch, size, one) for k, batch, _ in of_round for size in sizes for one in compared)


@torch.no_grad()
def measure(prepared: Prepared, points: Iterator[Point], deadline: Deadline) -> dict[Point, tuple[float, float]]:
    """Measure points, which may come twice, in order while there is time for the next one; the first one always.

    Theta and the compute dtype stay as they are.
    """
    session, sampler, train = prepared.session, prepared.sampler, prepared.rows["train"]

    @lru_cache(maxsize=1)
    def loss_of(step: int) -> LossFn:
        numbers = sampler.batch(step)
        return session.loss_of([train[i] for i in numbers], sampler.weights(numbers))

    losses: dict[Point, tuple[float, float]] = {}
    taken: dict[tuple[bool, str], float] = {}  # (a single loss or a pair, dtype) -> seconds
    for point in points:
        way = point.direction < 0, point.dtype
        if point in losses:
            continue
        if losses and not deadline.allows(taken.get(way, 0.0)):
            break
        start, loss_fn, dtype = time.perf_counter(), loss_of(point.batch), DTYPES[point.dtype]
        with session.forward.using_compute_dtype(dtype):
            if point.direction < 0:
                losses[point] = (float(loss_fn()),) * 2
            else:
                z = Direction(session.config.seed, point.direction)
                losses[point] = spsa(session.forward, loss_fn, [z], point.eps)[0][:2]
        seconds = time.perf_counter() - start
        taken[way] = min(seconds, taken.get(way, seconds))
    return losses


def projected_grads(losses: Losses, *ways: tuple[float, str]) -> list[list[float]]:
    """Return g of the directions that are measured in all of some ways (eps, dtype): a list for each way.

    Only the first batch of a direction counts, so that all lists are of the same directions and batches.
    """
    grads: list[list[float]] = [[] for _ in ways]
    for point in losses:
        points = [point._replace(eps=eps, dtype=dtype) for eps, dtype in ways]
        is_first = point == points[0] and 0 <= point.batch <= 2 * point.direction
        if is_first and all(one in losses for one in points):
            for values, one in zip(grads, points, strict=True):
                plus, minus = losses[one]
                values.append((plus - minus) / (2 * one.eps))
    return grads


def whole_directions(losses: Losses, eps: float, whole: bool) -> np.ndarray:
    """Return loss_plus, loss_minus and the loss at theta in float32, of the directions of which all are measured.

    Returns:
        float64, [directions, the two batches, 3].
    """
    rows = []
    for k in sorted({point.direction for point in losses if point.direction >= 0}):
        points = [(Point(k, batch, eps, "float32"), Point(-1, batch, 0.0, "float32")) for batch in batches_of(k, whole)]
        if all(point in losses for both in points for point in both):
            rows.append([[*losses[pair], losses[middle][0]] for pair, middle in points])
    return np.array(rows, np.float64).reshape(-1, 2, 3)


def rounding(losses: Losses, eps: float) -> float:
    """Return what rounding of the two float32 losses may make of g, as a fraction of mean |g|; inf if every g is 0."""
    g = projected_grads(losses, (eps, "float32"))[0]
    loss = max((abs(value) for point, pair in losses.items() if point.eps == eps for value in pair), default=0.0)
    return FLOAT32_STEP * loss / eps * len(g) / sum(map(abs, g)) if any(g) else math.inf


def hides(noise: float) -> bool:
    """Return whether rounding, as `rounding` gives it, hides g."""
    return FLOAT32_NOISE <= noise < math.inf


def compare(losses: Losses, eps: float) -> list[Row]:
    """Return, for each eps and dtype that is measured, how g agrees with float32 and with the slope of the loss.

    The slope is g in float32 at the smallest eps that float32 resolves. Its own error is what rounding may make of it.
    """
    sizes = sorted({*EPS, eps})
    resolved = next((size for size in sizes if rounding(losses, size) < FLOAT32_NOISE), None)
    rows = []
    for size in sizes:
        for dtype in DTYPES:
            g, exact, slope = projected_grads(losses, (size, dtype), (size, "float32"), (resolved or size, "float32"))
            if g:
                error = agreement(g, slope).relative_error if resolved else math.inf
                error = max(error, rounding(losses, size)) if (size, dtype) == (resolved, "float32") else error
                rows.append((size, dtype, agreement(g, exact), error))
    return rows


def judge_resolution(section: Section, rows: list[Row], eps: float, dtype: str, noise: float, plain: str) -> float:
    """Judge the error of g at the run's eps and dtype; return the eps that does: it, or the smallest other one.

    `rows` are from `compare`, `noise` at this eps from `rounding`; `plain`: what float32 stands for in this model.
    """
    of_run = next((row for row in rows if row[:2] == (eps, dtype)), None)
    others = [row for row in rows if row[1] == dtype and row[0] != eps]
    is_compared = bool(others) and of_run is not None and of_run[2].directions >= COMPARED and of_run[3] < math.inf
    # Rounding that hides the signal shows without another eps.
    if of_run is None or not (is_compared or MAX_RELATIVE_ERROR < of_run[2].relative_error < math.inf):
        why, advice = "every g is 0" if noise == math.inf else "too little time", "give more --seconds"
        if hides(noise):
            why, advice = f"rounding alone changes g by up to {percent(noise)}", f"try optimizer.eps={PAPER_EPS:g}"
        text = f"optimizer.eps={eps:g} was not compared with another eps in {dtype}: {why}"
        section.add(UNKNOWN, "resolution", text, advice, eps=eps)
        return eps
    error, rounded = of_run[3], of_run[2].relative_error
    too_small = hides(noise) or rounded > MAX_RELATIVE_ERROR
    fits = error <= MAX_OFF and not too_small
    fitting = [e for e, _, agreed, off in others if agreed.relative_error <= MAX_RELATIVE_ERROR and off <= MAX_OFF]
    best = eps if fits else min(fitting, default=None)
    verdict, judged = OK, "resolves the signal"
    if not fits:
        verdict = DOUBT if too_small or error > MAX_RELATIVE_ERROR else NOTE
        judged = "is too small, rounding makes g noisy" if too_small else "is large, the loss bends within eps"
    off = f"{percent(rounded)} from float32 ({plain}), by {percent(error)}" if dtype != "float32" else percent(error)
    ways = [f"optimizer.eps={best:g}, the smallest that was measured to do"] if best not in (None, eps) else []
    if dtype != "float32" and too_small:
        halves = {name: agreed.relative_error for e, name, agreed, _ in rows if e == eps and name != "float32"}
        finer = [name for name, off in halves.items() if name != dtype and off <= MAX_RELATIVE_ERROR]
        ways += [f"model.compute_dtype={name}" for name in (*finer, "float32")] + ["a larger batch_size"]
    section.add(
        verdict,
        "resolution",
        f"optimizer.eps={eps:g} {judged} in {dtype}: g is off by {off} from the derivative of the loss along z"
        f" ({count(of_run[2].directions, 'direction')}). Below, correlation and error are against float32 at that eps",
        f"try {' or '.join(ways)}"
        if best is not None
        else f"no eps of the table does{'; try ' * bool(ways)}{' or '.join(ways)}",
        table=[HEADER, *map(_cells, rows)],
        eps=eps,
        dtype=dtype,
        relative_error=rounded,
        slope_error=error,
        recommended=best,
        rows=[{"eps": e, "dtype": d, **asdict(a), "slope_error": slope} for e, d, a, slope in rows],
    )
    return best or eps


def _cells(row: Row) -> tuple[str, ...]:
    eps, dtype, agreed, slope = row
    correlation = "-" if math.isnan(agreed.correlation) else f"{agreed.correlation:.3f}"
    fractions = (percent(agreed.relative_error), percent(agreed.zeros), percent(slope))
    return f"{eps:g}", dtype, correlation, *fractions, str(agreed.directions)


# --- rewards ---


@torch.no_grad()
def check_rewards(prepared: Prepared, deadline: Deadline) -> Section:
    """Reward the completions of members on rows of the first batches, while there is time; theta is not changed.

    The members are theta + eps z and theta - eps z of one direction or more: what a step of any method compares.
    """
    section, session, train = Section("rewards"), prepared.session, prepared.rows["train"]
    config, objective = session.config, session.config.objective
    if config.steps == 0:
        section.add(OK, "not_needed", "steps=0: no step is taken, so members need not differ")
        return section
    assert isinstance(session.objective, Generation)
    assert isinstance(objective, GenerateConfig)
    rows = [train[i] for i in make_sampler(config.replace(batch_size=REWARDED_ROWS), train).batch(0)]
    loss_of, eps = session.loss_of(rows), zeroth_order(config.optimizer).eps
    session.objective.begin_step(0)
    members, seconds, start = 0, 0.0, time.perf_counter()
    while members < MEMBERS and (not members or deadline.allows(2 * seconds / members)):
        with session.forward.perturbed(Direction(config.seed, 0, members // 2), eps):
            loss_of()
        members, seconds = members + 2, time.perf_counter() - start
    figures = session.objective.step_scalars(session.optimizer.count_forwards)
    figures |= {"members": members, "rows": len(rows), "seconds": seconds}
    mean, among = figures["reward"], f"{members} members at optimizer.eps={eps:g} on {count(len(rows), 'row')}"
    text = (
        f"{among} have the mean reward {mean:.4g}, from {figures['reward_min']:.4g} to {figures['reward_max']:.4g}"
        f" (standard deviation {figures['reward_std']:.2g})"
    )
    if equal := figures["reward_std"] == 0:
        text = f"no signal: all of {among} have the mean reward {mean:.4g}"
    advice = (
        f"a step with equal members changes nothing: raise optimizer.eps ({eps:g} changes no completion enough), or"
        " soften the reward: add parts that also count what is nearly right, objective.reward={NAME: WEIGHT, ...}"
    )
    section.judge("spread", equal, text, advice, eps=eps, **figures)
    fraction = figures["agreeing_rows"]
    text = f"on {percent(fraction)} of the rows all members have the same reward: they give no signal"
    advice = "use a larger batch_size, a larger optimizer.eps, or a reward with more levels"
    section.add(NOTE if fraction >= AGREEING else OK, "agreement", text, advice, agreeing_rows=fraction)
    fraction = figures["truncated"]
    text = (
        f"{percent(fraction)} of the completions are cut at objective.max_new_tokens={objective.max_new_tokens};"
        f" they have {figures['length']:.3g} tokens in the mean"
    )
    advice = "raise objective.max_new_tokens if an answer needs more, or end it by task.generate.stop"
    section.judge("truncated", fraction > TRUNCATED, text, advice, truncated=fraction, length=figures["length"])
    return section
