"""Check the signal: is the difference of the two losses resolved, at which eps, and which learning rate suits it."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from mezo_cli.config.schema import Config
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.diagnosis import learning_rate
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import Section, count, percent, short
from mezo_cli.diagnosis.learning_rate import FLOAT32_STEP, Estimate
from mezo_cli.diagnosis.losses import DIRECTIONS, EPS, Losses, measure, plan_points, projected_grads
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.models.loading import DTYPES
from mezo_cli.optim import LossFn
from mezo_cli.optim.settings import zeroth_order
from mezo_cli.report.paper import paper
from mezo_cli.report.settings import method_name
from mezo_cli.training.precision import MAX_RELATIVE_ERROR, Agreement, agreement, describe_reference
from mezo_cli.training.setup import Session

TITLE = "signal"
MAX_ZEROS = 0.1
FLOAT32_NOISE = 0.05  # of mean |g|; an eps at which float32 is worse does not serve as the slope
GOOD = 0.2  # relative error up to which the run's own eps is kept
TOO_LARGE = 2.0  # times the best lr: beyond it a step is expected to raise the loss
LITTLE = 0.1  # of the loss: a run whose steps together are expected to lower it by less is too short or too slow

Row = tuple[float, str, Agreement, float]  # eps, dtype, agreement with float32 at that eps, error against the slope


def check(prepared: Prepared, deadline: Deadline) -> Section:
    """Measure the signal of the run's first directions and batches; theta is not changed."""
    section, session = Section(TITLE), prepared.session
    config, optimizer = session.config, session.optimizer
    if config.steps == 0 or not optimizer.replayable:
        why = "steps=0: no step is taken" if config.steps == 0 else f"optimizer={config.optimizer.name} backpropagates"
        section.ok("not_needed", f"{why}, so there is no projected gradient to check")
        return section
    eps, dtype = zeroth_order(config.optimizer).eps, config.model.compute_dtype
    sampler = BatchSampler(len(prepared.train), config.batch_size, config.seed)
    whole = sampler.batch_size == sampler.rows
    losses = measure(session, _losses(prepared, sampler), plan_points(eps, whole), deadline)
    rows = compare(losses, eps)
    _name_cut(section, losses, rows, eps)
    if not all(math.isfinite(loss) for pair in losses.values() for loss in pair):
        section.doubt(
            "finite",
            "a loss at theta +- eps z is not finite",
            "use a smaller optimizer.eps, or model.compute_dtype=float32",
        )
        return section
    judge_resolution(section, rows, eps, dtype, describe_reference(session))
    _judge_zeros(section, rows, config)
    _report_grads(section, projected_grads(losses, eps, "float32", [])[0])
    judge_learning_rate(section, learning_rate.estimate(learning_rate.from_losses(losses, eps, whole), eps), config)
    return section


def compare(losses: Losses, eps: float) -> list[Row]:
    """Return, for each eps and dtype that is measured, how g agrees with float32 and with the slope of the loss.

    The slope is g in float32 at the smallest eps that float32 resolves.
    """
    smallest = _slope_eps(losses, eps)
    found = []
    for one in sorted({*EPS, eps}):
        for dtype in DTYPES:
            g, exact, slope = projected_grads(losses, one, dtype, [(one, "float32"), (smallest, "float32")])
            if g:
                found.append((one, dtype, agreement(g, exact), agreement(g, slope).relative_error))
    return found


def judge_resolution(section: Section, rows: list[Row], eps: float, dtype: str, reference: str) -> None:
    """Judge the error of g at the run's eps and dtype, and recommend an eps.

    Args:
        section: gets the findings.
        rows: from `compare`.
        eps, dtype: the run's.
        reference: what float32 stands for in this model.
    """
    own = next((row for row in rows if (row[0], row[1]) == (eps, dtype)), None)
    if own is None:
        return
    best = min((row for row in rows if row[1] == dtype), key=lambda row: (row[3], abs(math.log(row[0] / eps))))
    recommended = eps if own[3] <= GOOD else best[0] if best[3] <= MAX_RELATIVE_ERROR else None
    doubtful = max(own[2].relative_error, own[3]) > MAX_RELATIVE_ERROR
    measured = count(own[2].directions, "direction")
    if dtype == "float32":
        off = percent(own[3])
    else:
        off = f"{percent(own[2].relative_error)} from float32 ({reference}), by {percent(own[3])}"
        measured += ", |g' - g| / |g|"
    text = f"optimizer.eps={eps:g} in {dtype}: g is off by {off} from the derivative of the loss along z ({measured})"
    rounds = own[2].relative_error > MAX_RELATIVE_ERROR
    ways = [f"optimizer.eps={best[0]:g}, where g is off by {percent(best[3])}"] if best[3] < own[3] else []
    ways += ["model.compute_dtype=float32", "a larger batch_size"] if dtype != "float32" and rounds else []
    advice = f"try {' or '.join(ways)}" if ways else "no other eps that was measured is better"
    section.judge(
        "resolution",
        doubtful,
        text,
        f"{'rounding hides the signal' if rounds else 'the loss bends within eps'}: {advice}",
        eps=eps,
        dtype=dtype,
        relative_error=own[2].relative_error,
        slope_error=own[3],
    )
    header = ("eps", "dtype", "correlation", "error", "zeros", "off derivative", "directions")
    cells = [
        (
            f"{e:g}",
            d,
            "-" if math.isnan(a.correlation) else f"{a.correlation:.3f}",
            percent(a.relative_error),
            percent(a.zeros),
            percent(slope),
            str(a.directions),
        )
        for e, d, a, slope in rows
    ]
    kept = "the run's own" if recommended == eps else f"the run has {eps:g}"
    text = f"recommended: optimizer.eps={recommended:g} ({kept})" if recommended else "no eps can be recommended yet"
    section.ok(
        "recommended_eps",
        f"{text}. Correlation and error: against float32 at that eps",
        table=[header, *cells],
        eps=recommended,
        rows=[{"eps": e, "dtype": d, **dataclasses.asdict(a), "slope_error": slope} for e, d, a, slope in rows],
    )


def judge_learning_rate(section: Section, found: Estimate | None, config: Config) -> None:
    """Judge optimizer.lr against the one at which a step is expected to help most, for plain MeZO and n-SPSA."""
    grid = grid_of_paper(config)
    beside = f"; the paper's grid: {grid[0]:g} to {grid[1]:g}, RoBERTa-large" if grid else ""
    if config.optimizer.name != "mezo":
        section.ok("learning_rate", f"optimizer={config.optimizer.name}: a best lr is derived for mezo alone{beside}")
        return
    if found is None:
        section.ok("learning_rate", f"too few directions to tell a learning rate{beside}")
        return
    lr, n = config.optimizer.lr, zeroth_order(config.optimizer).samples
    figures = {**dataclasses.asdict(found), "lr": found.lr * n, "optimizer_lr": lr, "paper_grid": grid}
    squared = f"|gradient|^2 {short(found.gain)} +- {short(found.gain_error)}, z.Hz {short(found.curvature)}"
    if not found.is_resolved:
        why = (
            "the gradient is not told from the noise of the batches"
            if found.gain <= found.gain_error
            else "the curvature is not told from rounding, or the loss does not curve upwards"
        )
        text = f"no best lr can be told: {why} ({squared}; {count(found.directions, 'direction')}){beside}"
        section.ok("learning_rate", text, "give more --seconds or a larger batch_size", **(figures | {"lr": None}))
        return
    best, error = found.lr * n, found.lr_error * n
    change = found.expected_change(lr, n)
    text = (
        f"a step is expected to help most at lr {best:.1e} (+- {error:.0e}; {squared}; {found.directions}"
        f" directions){beside}. Now optimizer.lr={lr:g}: the loss changes by {change:.1e} per step at first"
    )
    figures["expected_change"] = change
    if lr > TOO_LARGE * (best + error):
        advice = f"a step at this lr is expected to raise the loss: try optimizer.lr={best:.0e}"
        section.doubt("learning_rate", text, advice, **figures)
    elif lr < best and -change * config.steps < LITTLE * found.loss:
        falls = f"{short(-change * config.steps)} of {short(found.loss)} in {count(config.steps, 'step')}"
        advice = f"at this rate the loss falls by {falls}: raise optimizer.lr, up to {best:.0e}, or steps"
        section.doubt("learning_rate", text, advice, **figures)
    else:
        section.ok("learning_rate", text, **figures)


def grid_of_paper(config: Config) -> list[float] | None:
    """Return the lowest and highest lr of the paper's grid for the method; None if the paper has no such row."""
    plain = dataclasses.replace(config, init="none", steps=max(1, config.steps))
    grid: Mapping[str, list[float]] = paper().grid(method_name(plain))
    return grid.get("optimizer.lr")


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


def _slope_eps(losses: Losses, eps: float) -> float:
    """Return the smallest eps at which rounding of float32 losses stays below a fraction of mean |g|."""
    known = {point.eps for point in losses if point.direction >= 0 and point.dtype == "float32"}
    for one in sorted(known):
        g = projected_grads(losses, one, "float32", [])[0]
        loss = max(abs(value) for point, pair in losses.items() if point.eps == one for value in pair)
        if g and FLOAT32_STEP * loss / one < FLOAT32_NOISE * sum(map(abs, g)) / len(g):
            return one
    return eps


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
    text = f"g is exactly 0 in {percent(own.zeros)} of {count(own.directions, 'direction')}"
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
        section.cut.append(f"{measured} of {DIRECTIONS} directions for the learning rate")
    short_of: dict[int, list[str]] = {}  # number of directions -> eps
    for one in sorted({*EPS, eps}):
        directions = min((row[2].directions for row in rows if row[0] == one), default=0)
        short_of.setdefault(directions, []).append(f"{one:g}")
    for directions, names in short_of.items():
        if directions < DIRECTIONS:
            section.cut.append(f"{directions} of {DIRECTIONS} for eps {', '.join(names)}")
