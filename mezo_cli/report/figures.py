"""Figures of a page: lines with the table behind them, their legend and a note; those of one run; and axes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from mezo_cli.report.aggregate import Group
from mezo_cli.report.details import RunDetails, predicted_fractions, thin_indices
from mezo_cli.report.output import make_table
from mezo_cli.report.settings import format_mean, format_score, is_fraction, scale
from mezo_cli.report.svg import SERIES, SIZE, colour, inline_svg, new_axes, series_name
from mezo_cli.runs.metrics_log import metrics_of

if TYPE_CHECKING:  # matplotlib is imported when a figure is drawn
    from matplotlib.axes import Axes

SHOWN_LABELS = 6  # in the figure of predictions; the rest are counted together
SHOWN_LINES = len(SERIES)  # lines in colours of their own
CURVE_POINTS = 240  # at most, of a noisy curve
TABLE_ROWS = 24  # at most, in a table behind a figure
FEWEST = 10  # values that are smoothed at all
SMOOTHING = 20  # a smoothed point is the mean over about this fraction (1/20) of the curve
MARKERS = ("o", "s", "^", "D", "v", "P")  # of the series; the template shows the same
FEW = 25  # points up to which each is marked
Curve = TypeVar("Curve", pd.Series, pd.DataFrame)
DEV_FIELDS = {  # of evaluations, each with the title of its figure
    "loss": "Loss on dev",
    "drift": "Drift |theta - theta0| / |theta0|",
    "keep_log_prob": "Mean log-probability of the answers of data.keep",
    "keep_kl": "KL(theta0 || theta) on the answers of data.keep",
}


@dataclass(frozen=True)
class Figure:
    """A figure of a page.

    Attributes:
        title: what it shows.
        note: what is seen in it, or how it was computed; may be empty.
        table: the same numbers, as many as are worth reading.
        legend: (colour name, text) of each series; empty for a single one.
        svg: the drawing; empty if there is nothing to draw.
    """

    title: str
    note: str
    table: pd.DataFrame
    legend: Sequence[tuple[str, str]] = ()
    svg: str = ""


@dataclass(frozen=True)
class Line:
    """A line of a figure.

    Attributes:
        label: what it is, for the legend.
        curve: by what the horizontal axis shows: `mean`; `low` and `high` where it has a band; `raw` where the mean is
            over neighbouring values.
        group: of runs whose mean it is; its test score and the paper's number stand beside the curve.
    """

    label: str
    curve: pd.DataFrame
    group: Group | None = None


def make_figure(name: str, draw: Callable[["Axes"], Figure], size: tuple[int, int] = SIZE) -> Figure:
    """Return a figure with its drawing. Must be called inside `drawing`.

    Args:
        name: unique in the page.
        draw: draws on the axes, and returns the figure without the drawing.
        size: of the drawing.
    """
    axes = new_axes(size)
    figure = draw(axes)
    label = f"{figure.title}. {figure.note}".strip()
    return replace(figure, svg=inline_svg(axes, name, label)) if axes.has_data() else figure


# --- lines ---


def draw_lines(axes: "Axes", lines: Sequence[Line], metric: str, x: str = "step", points: bool = False) -> None:
    """Draw lines, the first few in colours of their own over the others, with their bands.

    To the right of the curves of groups stand our test score (filled, with its std) and the paper's (hollow).

    Args:
        axes: to draw on.
        lines: at least one.
        metric: that the vertical axis shows.
        x: what the horizontal axis shows.
        points: only points are drawn.
    """
    for number, line in reversed(list(enumerate(lines))):
        name, curve = series_name(number) if number < SHOWN_LINES else "quiet", line.curve
        if "low" in curve and (curve["high"] > curve["low"]).any():
            axes.fill_between(curve.index, curve["low"], curve["high"], color=colour(name), alpha=0.2, linewidth=0)
        if "raw" in curve:
            axes.plot(extremes(curve["raw"]), color=colour(name), alpha=0.5, linewidth=0.8)
        few = 1 if name == "quiet" else FEW
        marker: dict[str, Any] = (
            {"marker": MARKERS[number % len(MARKERS)], "ms": 4} if points or len(curve) <= few else {}
        )
        thickness = 0 if points else 0.8 if name == "quiet" else 1.8
        mean = curve["mean"].iloc[thin_indices(len(curve), CURVE_POINTS)]
        axes.plot(mean, color=colour(name), linewidth=thickness, **marker)
    score_axis(axes, metric)
    furthest = max(line.curve.index.max() for line in lines)
    step_axis(axes, furthest, x)
    width = furthest or 1
    place = 1.06 * width
    for number, line in enumerate(lines[:SHOWN_LINES]):
        if line.group is not None and _draw_scores(axes, line.group, place, colour(series_name(number))):
            place += 0.035 * width
    if place > 1.06 * width:
        axes.set_xlim(-0.03 * width, place)


def _draw_scores(axes: "Axes", group: Group, x: float, shade: str) -> bool:
    """Draw a group's test score and the paper's at a place; return whether there is one."""
    if group.mean is not None:
        factor = scale(group.metric)
        error = None if group.std is None else [factor * group.std]
        axes.errorbar([x], [factor * group.mean], error, fmt="D", markersize=5, color=shade, elinewidth=1.2)
    if group.paper_number is not None:
        axes.plot([x], [group.paper_number.mean], "D", zorder=1.9, ms=7, mfc=colour("page"), mec=shade, mew=1.5)
    return group.mean is not None or group.paper_number is not None


def legend_of(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return (colour name, text) of each line; those that have no colour of their own are counted."""
    legend = []
    for number, line in enumerate(lines[:SHOWN_LINES]):
        text, group = line.label, line.group
        if group is not None and group.mean is not None:
            text += f": test {format_mean(group.metric, group.mean, group.std)}"
        if group is not None and group.paper_number is not None:
            text += f", paper {group.paper_number}"
        legend.append((series_name(number), text))
    rest = len(lines) - SHOWN_LINES
    return legend + ([("quiet", f"{rest:,} more")] if rest > 0 else [])


def number_table(values: pd.DataFrame, x: str = "step") -> pd.DataFrame:
    """Return a table of some rows of numbers, which are by `x`."""
    texts = values.iloc[thin_indices(len(values), TABLE_ROWS)].map("{:.4g}".format)
    return make_table("", texts.rename_axis(x).rename("{:,.0f}".format).reset_index(), left=0)


# --- of one run ---


def run_figures(run: RunDetails, name: str) -> list[Figure]:
    """Return the figures of a run, those for which it has numbers. `name` is unique in the page."""
    parts: list[Callable[..., Figure]] = [_rewards if run.rewards else draw_loss] * bool(len(run.losses))
    parts += [draw_dev] * bool(run.dev)
    fields = [field for field in DEV_FIELDS if any(field in line for line in run.dev)]
    parts += [partial(_dev_field, field) for field in fields if field != "loss" or not run.rewards]
    parts += [_predictions] * any(predicted_fractions(line) for line in run.dev[:1])
    parts += [_gradients] * (run.projected_grads is not None)
    parts += [_speed] * (len(run.speed[0]) > 1)
    return [make_figure(f"{name}{number}", partial(draw, run)) for number, draw in enumerate(parts)]


def draw_loss(run: RunDetails, axes: "Axes") -> Figure:
    """Draw the training loss."""
    curve, note = smooth_curve(pd.Series(run.losses, run.steps))
    draw_lines(axes, [Line("loss", curve)], "loss")
    return Figure("Training loss", note, number_table(curve))


def _speed(run: RunDetails, axes: "Axes") -> Figure:
    steps, rates = run.speed
    curve, _ = smooth_curve(pd.Series(rates, steps))
    draw_lines(axes, [Line("steps/s", curve)], "steps/s")
    count_axis(axes)
    note = f"Median {run.median_speed:.3g} steps per second, evaluations between logged steps included."
    return Figure("Speed", note, number_table(curve))


def _rewards(run: RunDetails, axes: "Axes") -> Figure:
    rewards = smoothed(pd.DataFrame(run.rewards, run.steps))[0]
    names = {"reward": "mean", "reward_min": "low", "reward_max": "high"}
    lines = [Line("train, mean of the members", rewards.rename(columns=names))]
    dev = pd.DataFrame(run.dev)
    if "reward" in dev:
        lines.append(Line("dev", dev.set_index("step")[["reward"]].rename(columns=names)))
    draw_lines(axes, lines, "reward")
    first, last = (f"{rewards['reward'].iloc[i]:.4g}" for i in (0, -1))
    note = f"The band is from the least to the greatest reward of the members of a step. From {first} to {last}"
    note += ", means of neighbouring steps." if len(rewards) >= FEWEST else "."
    return Figure("Reward", note, number_table(rewards), legend_of(lines))


def _dev_field(field: str, run: RunDetails, axes: "Axes") -> Figure:
    """Draw a field of the evaluations on dev that has them at every step, or at some."""
    values = pd.Series({line["step"]: line[field] for line in run.dev if field in line})
    draw_lines(axes, [Line(field, pd.DataFrame({"mean": values}))], "loss")
    first, last = (f"{values.iloc[i]:.4g} at step {values.index[i]:,}" for i in (0, -1))
    note = f"{first}, {last}; lowest {values.min():.4g} at step {values.idxmin():,}."
    return Figure(DEV_FIELDS[field], note, number_table(pd.DataFrame({field: values})))


def draw_dev(run: RunDetails, axes: "Axes") -> Figure:
    """Draw the metric on dev, its first value as a level, its best marked."""
    assert run.best is not None
    dev = pd.DataFrame(run.dev).drop_duplicates("step", keep="last").set_index("step")
    names = dict.fromkeys([run.metric, *(name for name in metrics_of(run.dev[0]) if name != "loss")])
    shown = pd.DataFrame({f"{name}{' %' * is_fraction(name)}": scale(name) * dev[name] for name in names})
    scores, at = shown.iloc[:, 0], run.best["step"]
    start, best = (format_score(run.metric, line[run.metric], "%") for line in (run.dev[0], run.best))
    axes.axhline(scores.iloc[0], color=colour("quiet"), linewidth=1, linestyle=(0, (4, 3)))
    axes.plot([at], [scores[at]], "o", ms=9, mfc=colour("page"), mec=colour("c1"), mew=2, zorder=3)
    axes.margins(y=0.16)
    late = at > 0.6 * max(dev.index[-1], 1)
    side: dict[str, Any] = {"ha": "right", "xytext": (8, 9)} if late else {"ha": "left", "xytext": (-8, 9)}
    axes.annotate(f"best {best}", (at, scores[at]), textcoords="offset points", weight="bold", **side)
    draw_lines(axes, [Line(run.metric, pd.DataFrame({"mean": scores}))], run.metric)
    note = f"Dashed: {start} before the first step. Best: {best} at step {at}."
    return Figure(f"{run.metric.capitalize()} on dev", note, number_table(shown.assign(loss=dev["loss"])))


def _predictions(run: RunDetails, axes: "Axes") -> Figure:
    fractions = shown_fractions(run.dev)
    steps, names = fractions.index, [series_name(number) for number in range(fractions.shape[1])]
    drawn = fractions if len(steps) > 1 else fractions.loc[[*steps] * 2].set_axis([-0.5, 0.5])  # a bar at step 0
    axes.stackplot(drawn.index, 100 * drawn.T, colors=[*map(colour, names)], alpha=0.85, linewidth=0)
    axes.margins(x=0)
    step_axis(axes, steps[-1])
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:g}%")
    note = "The share of the dev rows that get each label. One band that fills the height is a collapse."
    legend = list(zip(names, map(str, fractions), strict=True))
    return Figure("Predictions per label", note, number_table((100 * fractions).add_suffix(" %")), legend)


def shown_fractions(dev: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the fractions of the most predicted labels, and of all others together, at each evaluation (step)."""
    fractions = pd.DataFrame([predicted_fractions(line) for line in dev], [line["step"] for line in dev]).fillna(0.0)
    if fractions.shape[1] <= SHOWN_LABELS:
        return fractions
    kept = fractions.sum().sort_values(ascending=False, kind="stable").index[: SHOWN_LABELS - 1]
    rest = fractions.drop(columns=kept)
    return fractions[kept].assign(**{f"{rest.shape[1]} other labels": rest.sum(axis=1)})


def _gradients(run: RunDetails, axes: "Axes") -> Figure:
    assert run.projected_grads is not None
    sizes = np.abs(run.projected_grads.astype(np.float64)).ravel()
    size, words = f"|{run.optimizer.symbol}|", run.optimizer.scalar.replace("grad", "gradient").replace("_", " ")
    zeros = int((sizes == 0).sum())
    rows = [{size: "0", "samples": f"{zeros:,}"}]
    if zeros < sizes.size:
        counts, edges = histogram(sizes[sizes > 0])
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=colour("c4"), edgecolor=colour("page"), lw=0.8)
        log_axis(axes, edges[0], edges[-1])
        axes.set_xlabel(size, loc="right")
        count_axis(axes, integer=True)
        bins = zip(edges[:-1], edges[1:], counts, strict=True)
        rows += [{size: f"{low:.3g} to {high:.3g}", "samples": f"{count:,}"} for low, high, count in bins]
    note = f"{zeros:,} of {sizes.size:,} are exactly 0 ({100 * zeros / sizes.size:.1f}%)"
    note += f"; mean {sizes.mean():.3g}, from {sizes.min():.3g} to {sizes.max():.3g}."
    return Figure(f"Size of the {words} {size}", note, make_table("", rows))


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


# --- curves ---


def smooth_curve(values: "pd.Series[float]") -> tuple[pd.DataFrame, str]:
    """Return the curve of a line of noisy values, as they are and their mean over neighbours; and what its lines are.

    Where there are few, they are the mean.
    """
    smooth, window = smoothed(values)
    if window == 1:
        return pd.DataFrame({"mean": values}), ""
    note = f"Thin: as logged. Thick: the mean of {window} neighbouring values."
    return pd.DataFrame({"raw": values, "mean": smooth}), note


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
    """Label the vertical axis of a metric: in percent, if it is a fraction."""
    if is_fraction(metric):
        axes.yaxis.set_major_formatter("{x:g}%")


def count_axis(axes: "Axes", integer: bool = False) -> None:
    """Label the vertical axis of counts or rates, from zero."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=integer))
    axes.yaxis.set_major_formatter(lambda value, _: short_count(value))


def log_axis(axes: "Axes", low: float, high: float) -> None:
    """Make the horizontal axis logarithmic from `low` to `high`: ticks at the powers of ten, or at three values."""
    axes.set_xscale("log")
    ticks = [10.0**power for power in range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)]
    ticks = [tick for tick in ticks if low <= tick <= high]
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
