"""The figures of one run, each with the table behind it, its legend and a note; and the axes of all figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from mezo_cli.report.details import RunDetails, predicted_fractions, thin_indices
from mezo_cli.report.output import make_table
from mezo_cli.report.settings import format_score, is_fraction, scale
from mezo_cli.report.svg import colour, drawing, inline_svg, new_axes, series_name
from mezo_cli.runs.scores import metrics_of

if TYPE_CHECKING:  # matplotlib is imported when a figure is drawn
    from matplotlib.axes import Axes

SHOWN_LABELS = 6  # in the figure of predictions; the rest are counted together
CURVE_POINTS = 240  # at most, of a noisy curve
TABLE_ROWS = 24  # at most, in a table behind a figure
FEWEST = 10  # values that are smoothed at all
SMOOTHING = 20  # a smoothed point is the mean over about this fraction (1/20) of the curve
Curve = TypeVar("Curve", pd.Series, pd.DataFrame)
ROUNDING = 1e-9  # of the greatest size: what is smaller came of rounding, and is counted beside the histogram
FEW = 40  # points up to which each is marked


@dataclass(frozen=True)
class Figure:
    """A figure of a page.

    Attributes:
        title: what it shows.
        note: what is seen in it, or how it was computed; may be empty.
        svg: the drawing.
        table: the same numbers, as many as are worth reading.
        legend: (colour name, text) of each series; empty for a single one.
    """

    title: str
    note: str
    svg: str
    table: pd.DataFrame
    legend: Sequence[tuple[str, str]] = ()


def run_figures(run: RunDetails, name: str) -> list[Figure]:
    """Return the figures of a run, those for which it has numbers. `name` is unique in the page."""
    parts = [_rewards if run.rewards else _loss] * bool(len(run.losses))
    parts += [_dev] * bool(run.dev)
    parts += [_predictions] * any(predicted_fractions(line) for line in run.dev[:1])
    parts += [_gradients] * (run.projected_grads is not None)
    with drawing():
        return [draw(run, f"{name}{number}") for number, draw in enumerate(parts)]


def _loss(run: RunDetails, name: str) -> Figure:
    axes = new_axes()
    smooth, note = draw_loss(axes, run)
    label = f"Training loss over steps, from {smooth.iloc[0]:.4f} to {smooth.iloc[-1]:.4f}"
    table = _table(run.steps, {"loss": (run.losses, ".4f"), "smoothed": (smooth, ".4f")})
    return Figure("Training loss", note, inline_svg(axes, name, label), table)


def draw_loss(axes: "Axes", run: RunDetails) -> tuple[pd.Series, str]:
    """Draw the training loss thin and, over it, its mean over neighbours; return this mean, and what the lines are."""
    losses = pd.Series(run.losses, run.steps)
    smooth, window = smoothed(losses)
    if window > 1:
        axes.plot(extremes(losses), color=colour("c1"), alpha=0.5, linewidth=0.8)
    shown = smooth.iloc[thin_indices(len(smooth), CURVE_POINTS)]
    axes.plot(shown, color=colour("c1"), linewidth=2, **_dots(len(losses) if window == 1 else FEW + 1))
    step_axis(axes, int(run.steps[-1]))
    return smooth, f"Thin: as logged. Thick: the mean of {window} neighbouring values." if window > 1 else ""


def _rewards(run: RunDetails, name: str) -> Figure:
    axes, rewards = new_axes(), pd.DataFrame(run.rewards, run.steps)
    smooth, _ = smoothed(rewards)
    at = smooth.index[thin_indices(len(smooth), CURVE_POINTS)]
    shown = smooth.loc[at]
    axes.fill_between(at, shown["reward_min"], shown["reward_max"], color=colour("c1"), alpha=0.25, linewidth=0)
    axes.plot(shown["reward"], color=colour("c1"), linewidth=2, **_dots(len(at)))
    dev = pd.DataFrame(run.dev)
    if "reward" in dev:
        axes.plot(dev["step"], dev["reward"], color=colour("c3"), linewidth=2, **_dots(len(dev)))
    step_axis(axes, int(run.steps[-1]))
    ends = [f"{shown['reward'].iloc[i]:.4g}" for i in (0, -1)]
    note = f"The band is from the least to the greatest reward of the members of a step. From {ends[0]} to {ends[1]}"
    note += ", means of neighbouring steps." if len(rewards) >= FEWEST else "."
    table = _table(run.steps, {name.replace("_", " "): (values, ".4g") for name, values in rewards.items()})
    legend = [("c1", "train, mean of the members"), *[("c3", "dev")] * ("reward" in dev)]
    return Figure("Reward", note, inline_svg(axes, name, f"Rewards over steps. {note}"), table, legend)


def _dev(run: RunDetails, name: str) -> Figure:
    axes = new_axes()
    best = draw_dev(axes, run)
    dev = pd.DataFrame(run.dev)
    columns = {name: dev[name] for name in metrics_of(run.dev[0]) if name not in (run.metric, "loss")}
    columns = {run.metric: dev[run.metric], **columns}
    cells = {f"{name}{' %' * is_fraction(name)}": (scale(name) * values, ".4g") for name, values in columns.items()}
    table = _table(dev["step"], {**cells, "loss": (dev["loss"], ".4f")})
    title = f"{run.metric.capitalize()} on dev"
    start = format_score(run.metric, run.dev[0][run.metric], "%")
    note = f"Dashed: {start} before the first step. Best: {best}."
    return Figure(title, note, inline_svg(axes, name, f"{title} over steps. {note}"), table)


def draw_dev(axes: "Axes", run: RunDetails) -> str:
    """Draw the metric on dev, its first value as a level, its best marked; return the best in words."""
    assert run.best is not None
    dev, at, best = pd.DataFrame(run.dev), run.best["step"], format_score(run.metric, run.best[run.metric], "%")
    scores = scale(run.metric) * dev[run.metric]
    axes.axhline(scores.iloc[0], color=colour("quiet"), linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(dev["step"], scores, color=colour("c3"), linewidth=2, **_dots(len(dev)))
    at_best = scale(run.metric) * run.best[run.metric]
    axes.plot([at], [at_best], "o", markersize=9, markerfacecolor=colour("page"), markeredgecolor=colour("c3"), mew=2)
    axes.margins(y=0.16)
    late = at > 0.6 * max(dev["step"].iloc[-1], 1)
    side: dict[str, Any] = {"ha": "right", "xytext": (8, 9)} if late else {"ha": "left", "xytext": (-8, 9)}
    axes.annotate(f"best {best}", (at, at_best), textcoords="offset points", weight="bold", **side)
    score_axis(axes, run.metric)
    step_axis(axes, dev["step"].iloc[-1])
    return f"{best} at step {at}"


def _predictions(run: RunDetails, name: str) -> Figure:
    fractions = shown_fractions(run.dev)
    axes, steps = new_axes(), fractions.index
    colours = [colour(series_name(number)) for number in range(fractions.shape[1])]
    drawn = fractions if len(steps) > 1 else fractions.loc[[*steps] * 2].set_axis([-0.5, 0.5])  # a bar at step 0
    axes.stackplot(drawn.index, 100 * drawn.T, colors=colours, alpha=0.85, linewidth=0)
    axes.margins(x=0)
    step_axis(axes, steps[-1])
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:g}%")
    note = "The share of the dev rows that get each label. One band that fills the height is a collapse."
    legend = [(series_name(number), str(label)) for number, label in enumerate(fractions)]
    table = _table(steps, {f"{label} %": (100 * fractions[label], ".1f") for label in fractions})
    svg = inline_svg(axes, name, "Share of the dev rows predicted as each label, over steps")
    return Figure("Predictions per label", note, svg, table, legend)


def shown_fractions(dev: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the fractions of the most predicted labels, and of all others together, at each evaluation (step)."""
    fractions = pd.DataFrame([predicted_fractions(line) for line in dev], [line["step"] for line in dev]).fillna(0.0)
    if fractions.shape[1] <= SHOWN_LABELS:
        return fractions
    kept = fractions.sum().sort_values(ascending=False, kind="stable").index[: SHOWN_LABELS - 1]
    rest = fractions.drop(columns=kept)
    return fractions[kept].assign(**{f"{rest.shape[1]} other labels": rest.sum(axis=1)})


def _gradients(run: RunDetails, name: str) -> Figure:
    from matplotlib.ticker import MaxNLocator

    assert run.projected_grads is not None
    sizes = np.abs(run.projected_grads.astype(np.float64)).ravel()
    size, words = f"|{run.optimizer.symbol}|", run.optimizer.scalar.replace("grad", "gradient").replace("_", " ")
    zeros, svg, rows = int((sizes == 0).sum()), "", [{size: "0", "samples": f"{(sizes == 0).sum():,}"}]
    note = f"{zeros:,} of {sizes.size:,} are exactly 0 ({100 * zeros / sizes.size:.1f}%)"
    if zeros < sizes.size:
        axes = new_axes()
        counts, edges = histogram(sizes[sizes > sizes.max() * ROUNDING])
        tiny = int(((sizes > 0) & (sizes <= sizes.max() * ROUNDING)).sum())
        note += f"; {tiny:,} of less than {ROUNDING:g} of the greatest are not drawn" if tiny else ""
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=colour("c4"), edgecolor=colour("page"), lw=0.8)
        log_axis(axes, edges[0], edges[-1])
        axes.set_xlabel(size, loc="right")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: short_count(value))
        svg = inline_svg(axes, name, f"Histogram of the sizes of the {words}s. {note}")
        bins = zip(edges[:-1], edges[1:], counts, strict=True)
        rows += [{size: f"{low:.3g} to {high:.3g}", "samples": f"{count:,}"} for low, high, count in bins]
    note += f"; mean {sizes.mean():.3g}, from {sizes.min():.3g} to {sizes.max():.3g}."
    return Figure(f"Size of the {words} {size}", note, svg, make_table("", rows))


def histogram(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts of positive values in bins of equal width on a logarithmic scale, and the bins' edges.

    There are about sqrt(n) bins, from 6 to 30.
    """
    low, high = float(sizes.min()), float(sizes.max())
    if high / low < 1.01:
        low, high = low / 1.1, high * 1.1
    edges = np.geomspace(low, high, min(30, max(6, int(np.sqrt(sizes.size)))) + 1)
    edges[0], edges[-1] = low, high  # as rounding may put the ends inside
    return np.histogram(sizes, edges)[0], edges


def _table(steps: Any, columns: Mapping[str, tuple[Any, str]]) -> pd.DataFrame:
    """Return a table over some of the steps, of columns (values, format)."""
    at = thin_indices(len(steps), TABLE_ROWS)
    cells = {name: [f"{value:{form}}" for value in np.asarray(values)[at]] for name, (values, form) in columns.items()}
    return make_table("", pd.DataFrame({"step": [f"{step:,}" for step in np.asarray(steps)[at]], **cells}), left=0)


# --- curves ---


def smoothed(values: Curve) -> tuple[Curve, int]:
    """Return the means over neighbouring values of a curve, and over how many; over one where the values are few."""
    window = 2 * max(len(values) // (2 * SMOOTHING), 1) + 1 if len(values) >= FEWEST else 1
    return values.rolling(window, center=True, min_periods=1).mean(), window


def extremes(values: pd.Series) -> pd.Series:
    """Return at most `CURVE_POINTS` values that keep the range of a noisy curve: the ends of each part's range."""
    if len(values) <= CURVE_POINTS:
        return values
    part = np.arange(len(values)) * (CURVE_POINTS // 2) // len(values)
    ranges = values.groupby(part)
    return values[sorted({*ranges.idxmin(), *ranges.idxmax()})]


def _dots(count: int) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4} if count <= FEW else {}


# --- axes ---


def step_axis(axes: "Axes", last: int, label: str = "step") -> None:
    """Label the axis of steps or forwards, up to the last one."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label, loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=2))
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
    if last == 0:
        axes.set_xlim(-1, 1)
        axes.set_xticks([0], ["0"])


def score_axis(axes: "Axes", metric: str) -> None:
    """Label the vertical axis of a metric: in percent and up to 100, if it is a fraction. Called after drawing."""
    if is_fraction(metric):
        axes.yaxis.set_major_formatter("{x:g}%")
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= min(high, 100)])
    elif axes.dataLim.height == 0:  # all values are the same
        axes.set_yticks([axes.dataLim.y0])


def log_axis(axes: "Axes", low: float, high: float) -> None:
    """Make the horizontal axis logarithmic from `low` to `high`: ticks at the powers of ten, or at three values."""
    axes.set_xscale("log")
    ticks = [10.0**power for power in range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    ticks = ticks[:: max(1, -(-len(ticks) // 6))]  # at most six, so that their labels have room
    if len(ticks) < 2:
        ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 3)})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def short_count(value: float) -> str:
    """Return a count in short: 500, 20k, 1.5M."""
    for unit, sign in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if sign == 'k' else unit):g}{sign}"
    return f"{value:g}"
