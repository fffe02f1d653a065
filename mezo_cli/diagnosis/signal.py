"""Check the signal: is the difference of the two losses resolved, at which eps, and which learning rate suits it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from mezo_cli.config.schema import Config
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.diagnosis import learning_rate
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Section, count, percent, short
from mezo_cli.diagnosis.learning_rate import FLOAT32_STEP, Estimate
from mezo_cli.diagnosis.losses import DIRECTIONS, EPS, Losses, measure, plan_points, projected_grads
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.models.loading import DTYPES
from mezo_cli.optim import LossFn
from mezo_cli.optim.settings import zeroth_order
from mezo_cli.report.paper import paper
from mezo_cli.report.settings import method_name
from mezo_cli.training.precision import MAX_RELATIVE_ERROR, Agreement, agreement, describe_reference
from mezo_cli.training.session import Session

TITLE = "signal"
MAX_ZEROS = 0.1
FLOAT32_NOISE = 0.05  # of mean |g|; an eps at which float32 is worse does not serve as the slope
GOOD, FINE = 0.2, 0.01  # relative error up to which the run's own eps is kept; up to which the largest eps is named
BETTER = 0.5  # times the error of the run's own eps, for another one to be named
COMPARED = 2  # directions in which the run's own eps is compared with another one
PAPER_EPS = 1e-3
TOO_LARGE = 2.0  # times the best lr: beyond it a step is expected to raise the loss
LITTLE = 0.1  # of the loss: a run whose steps together are expected to lower it by less is too short or too slow

Row = tuple[float, str, Agreement, float]  # eps, dtype, agreement with float32 at that eps, error against the slope


def check(prepared: Prepared, deadline: Deadline) -> Section:
    """Measure the signal of the run's first directions and batches; theta is not changed."""
    section, session = Section(TITLE), prepared.session
    config, optimizer = session.config, session.optimizer
    if config.steps == 0:
        section.ok("not_needed", "steps=0: no step is taken, so there is no projected gradient to check")
        return section
    if not optimizer.replayable:
        text = f"optimizer={config.optimizer.name} backpropagates: there is no projected gradient, and no lr is judged"
        section.add(UNKNOWN, "not_needed", text)
        return section
    eps, dtype = zeroth_order(config.optimizer).eps, config.model.compute_dtype
    sampler = BatchSampler(len(prepared.train), config.batch_size, config.seed)
    whole = sampler.batch_size == sampler.rows
    losses = measure(session, _losses(prepared, sampler), plan_points(eps, dtype, whole), deadline)
    resolved = smallest_resolved(losses)
    rows = compare(losses, eps, resolved)
    _name_cut(section, losses, rows, eps)
    if not all(math.isfinite(loss) for pair in losses.values() for loss in pair):
        section.add(
            DOUBT,
            "finite",
            "a loss at theta +- eps z is not finite",
            "use a smaller optimizer.eps, or model.compute_dtype=float32",
        )
        return section
    noise = _rounding(losses, eps)
    better = judge_resolution(section, rows, eps, dtype, noise, describe_reference(session))
    _judge_zeros(section, rows, config)
    _report_grads(section, projected_grads(losses, eps, "float32", [])[0])
    found = learning_rate.estimate(learning_rate.from_losses(losses, eps, whole), eps)
    larger_eps = max(better, PAPER_EPS) if _hides(noise) else None
    judge_learning_rate(section, found, config, beside_paper(session), larger_eps)
    return section


def compare(losses: Losses, eps: float, resolved: float | None) -> list[Row]:
    """Return, for each eps and dtype that is measured, how g agrees with float32 and with the slope of the loss.

    The slope is g in float32 at the smallest eps that float32 resolves. Its own error is what rounding may make of it.
    """
    found = []
    for one in sorted({*EPS, eps}):
        for dtype in DTYPES:
            g, exact, slope = projected_grads(losses, one, dtype, [(one, "float32"), (resolved or one, "float32")])
            if g:
                error = agreement(g, slope).relative_error if resolved else math.inf
                error = max(error, _rounding(losses, one)) if (one, dtype) == (resolved, "float32") else error
                found.append((one, dtype, agreement(g, exact), error))
    return found


def judge_resolution(section: Section, rows: list[Row], eps: float, dtype: str, noise: float, reference: str) -> float:
    """Judge the error of g at the run's eps and dtype; return the eps that is named as the best one.

    Args:
        section: gets the finding.
        rows: from `compare`.
        eps, dtype: the run's.
        noise: what rounding of float32 losses makes of g at this eps, as a fraction of mean |g|; inf if every g is 0.
        reference: what float32 stands for in this model.
    """
    own = next((row for row in rows if row[:2] == (eps, dtype)), None)
    others = [row for row in rows if row[1] == dtype and row[0] != eps]
    if own is None or not _is_compared(own, others):
        why, advice = "too little time", "give more --seconds"
        if _hides(noise):
            why, advice = f"rounding alone changes g by up to {percent(noise)}", f"try optimizer.eps={PAPER_EPS:g}"
        elif noise == math.inf:
            why = "every g is 0"
        text = f"optimizer.eps={eps:g} was not compared with another eps in {dtype}: {why}"
        section.add(UNKNOWN, "resolution", text, advice, eps=eps)
        return eps
    error, rounding = own[3], own[2].relative_error
    too_small = _hides(noise) or rounding > MAX_RELATIVE_ERROR
    best = own if error <= GOOD and not too_small else _best(own, others)
    verdict, said = OK, "resolves the signal"
    if best is not own or max(error, rounding) > MAX_RELATIVE_ERROR:
        verdict = DOUBT if too_small or error > MAX_RELATIVE_ERROR else NOTE
        said = "is too small, rounding makes g noisy" if too_small else "is large, the loss bends within eps"
    off = (
        percent(error) if dtype == "float32" else f"{percent(rounding)} from float32 ({reference}), by {percent(error)}"
    )
    ways = [f"optimizer.eps={best[0]:g}, where g is off by {percent(best[3])}"] if best is not own else []
    ways += ["model.compute_dtype=float32", "a larger batch_size"] if dtype != "float32" and too_small else []
    section.add(
        verdict,
        "resolution",
        f"optimizer.eps={eps:g} {said} in {dtype}: g is off by {off} from the derivative of the loss along z"
        f" ({count(own[2].directions, 'direction')}). Below, correlation and error are against float32 at that eps",
        f"try {' or '.join(ways)}" if ways else "no other eps that was measured is better",
        table=[_HEADER, *map(_cells, rows)],
        eps=eps,
        dtype=dtype,
        relative_error=rounding,
        slope_error=error,
        recommended=best[0],
        rows=[{"eps": e, "dtype": d, **dataclasses.asdict(a), "slope_error": slope} for e, d, a, slope in rows],
    )
    return best[0]


def _hides(noise: float) -> bool:
    return FLOAT32_NOISE <= noise < math.inf


def _is_compared(own: Row, others: list[Row]) -> bool:
    """Return whether the error of the run's own eps is known; rounding that hides the signal shows without another."""
    enough = bool(others) and own[2].directions >= COMPARED and own[3] < math.inf
    return enough or MAX_RELATIVE_ERROR < own[2].relative_error < math.inf


def _best(own: Row, others: list[Row]) -> Row:
    """Return the largest exact eps, or else the least inexact one; the run's own unless that one is clearly better."""
    fine = [row for row in others if row[3] <= FINE]
    best = max(fine, key=lambda row: row[0]) if fine else min([own, *others], key=lambda row: row[3])
    return best if best[3] <= BETTER * own[3] else own


_HEADER = ("eps", "dtype", "corr.", "error", "zeros", "off derivative", "directions")


def _cells(row: Row) -> tuple[str, ...]:
    eps, dtype, agreed, slope = row
    correlation = "-" if math.isnan(agreed.correlation) else f"{agreed.correlation:.3f}"
    shares = (percent(agreed.relative_error), percent(agreed.zeros), percent(slope))
    return f"{eps:g}", dtype, correlation, *shares, str(agreed.directions)


def judge_learning_rate(
    section: Section, found: Estimate | None, config: Config, beside: str, larger_eps: float | None
) -> None:
    """Judge optimizer.lr against the one at which a step is expected to help most, for plain MeZO and n-SPSA.

    Args:
        section: gets the finding.
        found: the estimate; None with too few directions.
        config: of the run.
        beside: the paper's grid in words, from `beside_paper`.
        larger_eps: to try where the run's own is lost in rounding; None where it is not.
    """
    lr, n = config.optimizer.lr, zeroth_order(config.optimizer).samples
    figures: dict[str, Any] = {"lr": None, "optimizer_lr": lr}
    unjudged = f"optimizer.lr={lr:g} was not judged"
    if config.optimizer.name != "mezo":
        text = f"{unjudged}: the best step of optimizer={config.optimizer.name} is not derived{beside}"
        section.add(UNKNOWN, "learning_rate", text, **figures)
        return
    if found is None:
        text = f"{unjudged}: fewer than {learning_rate.MIN_DIRECTIONS} directions were measured{beside}"
        section.add(UNKNOWN, "learning_rate", text, "give more --seconds", **figures)
        return
    figures |= dataclasses.asdict(found)
    squared = f"|gradient|^2 {short(found.gain)} +- {short(found.gain_error)}, z.Hz {short(found.curvature)}"
    squared += f"; {count(found.directions, 'direction')}"
    if not found.is_resolved:
        why, advice = _unresolved(found, zeroth_order(config.optimizer).eps, larger_eps)
        text = f"{unjudged}: {why} ({squared}){beside}"
        section.add(UNKNOWN, "learning_rate", text, advice, **(figures | {"lr": None}))
        return
    best, error, change = found.lr * n, found.lr_error * n, found.expected_change(lr, n)
    falls = f"{short(-change * config.steps)} of {short(found.loss)} in {count(config.steps, 'step')}"
    if lr > TOO_LARGE * (best + error):
        verdict, said = DOUBT, "is too large: a step is expected to raise the loss"
        advice = f"try optimizer.lr={best:.0e}"
    elif lr < best and -change * config.steps < LITTLE * found.loss:
        verdict, said = DOUBT, f"is too small for steps={config.steps}: at this rate the loss falls by {falls}"
        advice = f"raise optimizer.lr, up to {best:.0e}, or steps"
    else:
        verdict, said, advice = OK, "looks safe", ""
    text = (
        f"optimizer.lr={lr:g} {said}. The best single step is at about {best:.1e} (+- {error:.0e}; {squared}); at"
        f" {lr:g} the loss changes by {change:.1e} per step at first{beside}"
    )
    figures |= {"lr": best, "expected_change": change}
    section.add(verdict, "learning_rate", text, advice, **figures)


def _unresolved(found: Estimate, eps: float, larger_eps: float | None) -> tuple[str, str]:
    """Return why no best lr can be told, and what to do."""
    if larger_eps is None and abs(found.curvature) <= 2 * found.curvature_floor:
        larger_eps = PAPER_EPS if eps < PAPER_EPS else 10 * eps
    if larger_eps is not None:
        return f"optimizer.eps={eps:g} is so small that rounding hides how the loss curves", (
            f"use optimizer.eps={larger_eps:g}"
        )
    more = "give more --seconds or a larger batch_size"
    if found.gain <= found.gain_error:
        return "the gradient is not told from the noise of the batches", more
    return "along these directions the loss does not curve upwards, so a step has no best length", more


def beside_paper(session: Session) -> str:
    """Return the paper's grid of the method, for models of this kind, as the end of a sentence; empty without one."""
    plain = dataclasses.replace(session.config, init="none")
    decoder = session.objective.model_kind.is_decoder
    grid = paper().grid(method_name(plain), decoder)
    if "optimizer.lr" not in grid:
        return ""
    low, high = grid["optimizer.lr"]
    at = f" at eps {grid['optimizer.eps'][0]:g}" if "optimizer.eps" in grid else ""
    model = "OPT" if decoder else "RoBERTa-large"
    return f"; the paper's grid for {model}: lr {low:g} to {high:g}{at}"


def _losses(prepared: Prepared, sampler: BatchSampler) -> Callable[[int], LossFn]:
    """Return a function from a step to the loss of its batch; the last one is kept."""
    session: Session = prepared.session
    last: dict[int, LossFn] = {}

    def loss_of(step: int) -> LossFn:
        if step not in last:
            last.clear()
            last[step] = session.loss_of([prepared.train[i] for i in sampler.batch(step)])
        return last[step]

    return loss_of


def smallest_resolved(losses: Losses) -> float | None:
    """Return the smallest eps at which rounding of float32 losses stays below a fraction of mean |g|; None without."""
    known = {point.eps for point in losses if point.direction >= 0 and point.dtype == "float32"}
    return next((eps for eps in sorted(known) if _rounding(losses, eps) < FLOAT32_NOISE), None)


def _rounding(losses: Losses, eps: float) -> float:
    """Return what rounding of the two float32 losses may make of g, as a fraction of mean |g|."""
    g = projected_grads(losses, eps, "float32", [])[0]
    loss = max((abs(value) for point, pair in losses.items() if point.eps == eps for value in pair), default=0.0)
    return FLOAT32_STEP * loss / eps * len(g) / sum(map(abs, g)) if any(g) else math.inf


def _judge_zeros(section: Section, rows: list[Row], config: Config) -> None:
    dtype = config.model.compute_dtype
    own = next((a for e, d, a, _ in rows if (e, d) == (zeroth_order(config.optimizer).eps, dtype)), None)
    if own is None:
        return
    loss = config.objective.loss
    advice = (
        f"a step with g = 0 changes nothing: objective.loss={loss} is constant almost everywhere; use cross_entropy, a"
        " larger batch_size or a larger optimizer.eps"
        if loss != "cross_entropy"
        else "a step with g = 0 changes nothing: use a larger optimizer.eps, or model.compute_dtype=float32"
    )
    share = percent(own.zeros) if own.zeros else "none"
    text = f"g is exactly 0 in {share} of {count(own.directions, 'direction')}"
    section.judge("zeros", own.zeros > MAX_ZEROS, text, advice, zeros=own.zeros, directions=own.directions)


def _report_grads(section: Section, g: list[float]) -> None:
    sizes = [abs(value) for value in g]
    if sizes:
        mean = sum(sizes) / len(sizes)
        spread = f"{min(sizes):.3g} to {max(sizes):.3g} ({count(len(sizes), 'direction')}, float32)"
        section.ok(
            "projected_grad",
            f"|g|: {mean:.3g} in the mean, {spread}",
            mean_abs=mean,
            min_abs=min(sizes),
            max_abs=max(sizes),
            directions=len(sizes),
        )


def _name_cut(section: Section, losses: Losses, rows: list[Row], eps: float) -> None:
    measured = len(projected_grads(losses, eps, "float32", [])[0])
    if measured < DIRECTIONS:
        section.cut.append(f"{DIRECTIONS - measured} of {DIRECTIONS} directions for the learning rate")
    short_of: dict[int, list[str]] = {}  # number of directions -> eps
    for one in sorted({*EPS, eps}):
        directions = min((row[2].directions for row in rows if row[0] == one), default=0)
        short_of.setdefault(directions, []).append(f"{one:g}")
    for directions, names in short_of.items():
        if directions < DIRECTIONS:
            section.cut.append(f"{DIRECTIONS - directions} of {DIRECTIONS} for eps {', '.join(names)}")
