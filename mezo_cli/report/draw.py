"""Draw the curves of one run, and of groups of runs, into the axes of a figure. For pages and for papers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mezo_cli.config.search_ranges import Range
from mezo_cli.console import printable
from mezo_cli.report.curves import Line
from mezo_cli.report.details import Evaluations
from mezo_cli.report.searches import Search
from mezo_cli.report.series import CURVE_POINTS, Curve, Histogram, extremes, thin_indices
from mezo_cli.report.svg import SERIES, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P")
SHOWN_LINES = len(SERIES)  # lines in colours of their own


def draw_curve(axes: "Axes", curve: Curve, name: str) -> None:
    """Draw a curve thin and its smoothed values over it."""
    from matplotlib.ticker import MaxNLocator

    at = extremes(curve.values, CURVE_POINTS)
    if curve.window > 1:
        axes.plot(curve.steps[at], curve.values[at], color=colour(name), alpha=0.5, linewidth=0.8)
        at = thin_indices(len(curve.steps), CURVE_POINTS)
    alone: dict[str, Any] = {"marker": "o", "markersize": 4} if len(at) == 1 else {}
    axes.plot(curve.steps[at], curve.smooth[at], color=colour(name), linewidth=2, **alone)
    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    step_axis(axes, int(curve.steps[-1]))


def draw_evaluations(axes: "Axes", dev: Evaluations, name: str) -> None:
    """Draw the metric on dev in percent: a line over the evaluations, the first as a level, the best marked."""
    at, scores = thin_indices(len(dev.steps), CURVE_POINTS), 100 * np.asarray(dev.scores)
    dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(dev.steps) <= 40 else {}
    axes.axhline(scores[0], color=colour("quiet"), linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(np.asarray(dev.steps)[at], scores[at], color=colour(name), linewidth=2, **dots)
    step, best = dev.steps[dev.best], float(scores[dev.best])
    axes.plot([step], [best], "o", markersize=9, markerfacecolor=colour("page"), markeredgecolor=colour(name), mew=2)
    axes.margins(y=0.16)
    late = step > 0.6 * max(dev.steps[-1], 1)
    side: dict[str, Any] = {"ha": "right", "xytext": (8, 9)} if late else {"ha": "left", "xytext": (-8, 9)}
    axes.annotate(f"best {best:.1f}%", (step, best), textcoords="offset points", weight="bold", **side)
    percent_axis(axes)
    step_axis(axes, dev.steps[-1])


def draw_histogram(axes: "Axes", found: Histogram, name: str) -> None:
    """Draw the counts of |g| as bars on a logarithmic axis."""
    widths = np.diff(found.edges)
    axes.bar(found.edges[:-1], found.counts, widths, align="edge", color=colour(name), edgecolor=colour("page"), lw=0.8)
    log_axis(axes, found.edges[0], found.edges[-1])
    axes.set_xlabel("|g|", loc="right")
    count_axis(axes)


def draw_trials(axes: "Axes", search: Search, searched: Range) -> None:
    """Draw the score of each trial of a search against one of the searched numbers.

    Each trial that was the best so far is filled, the best of all ringed; pruned ones are grey; diverged ones are
    crosses at the lower edge, where the axis of a loss is reversed: better is higher.
    """
    is_loss = search.goal == "loss"
    if searched.is_log:
        log_axis(axes, searched.low, searched.high)
    axes.set_xlim(*_padded(searched))
    for trial in search.trials:
        x, done = trial.values[searched.key], trial.end == "finished"
        if trial.end == "diverged":
            axes.plot([x], [0.03], "x", color=colour("c2"), markersize=6, transform=axes.get_xaxis_transform())
        elif trial.score is not None:
            y = trial.score if is_loss else 100 * trial.score
            name = "c1" if done else "quiet"
            inside = colour(name if trial.is_record else "page")
            axes.plot([x], [y], "o", markersize=6 if done else 4, mec=colour(name), mfc=inside, mew=1.5)
    records = [trial for trial in search.trials if trial.is_record]
    if records:
        best, y = records[-1], records[-1].score or 0.0
        at = best.values[searched.key], y if is_loss else 100 * y
        axes.plot(*at, "o", markersize=13, mec=colour("c1"), mfc="none", mew=1.5)
    axes.margins(y=0.16)
    axes.set_xlabel(label_text(searched.key), loc="right", parse_math=False)
    if is_loss:
        axes.invert_yaxis()
    else:
        percent_axis(axes)


def _padded(searched: Range) -> tuple[float, float]:
    """Return the ends of the axis of a range: a little beyond, so that no mark is cut."""
    low, high = searched.low, searched.high
    if searched.is_log:
        return low * (low / high) ** 0.04, high * (high / low) ** 0.04
    return low - 0.04 * (high - low), high + 0.04 * (high - low)


def log_axis(axes: "Axes", low: float, high: float) -> None:
    """Make the horizontal axis logarithmic from `low` to `high`: ticks at the powers of ten, or at three values."""
    axes.set_xscale("log")
    ticks = [10.0**power for power in range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) < 2:
        ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 3)})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def draw_shares(axes: "Axes", steps: Sequence[int], shares: Mapping[str, Sequence[float]]) -> None:
    """Draw the share of the rows predicted as each label, in percent, stacked."""
    at, bottom = thin_indices(len(steps), CURVE_POINTS), np.zeros(len(steps))
    x = np.asarray(steps)
    for number, values in enumerate(shares.values()):
        top = bottom + 100 * np.asarray(values)
        shade: dict[str, Any] = {"color": colour(series_name(number)), "linewidth": 0, "alpha": 0.85}
        if len(steps) == 1:
            axes.bar([0], top - bottom, 0.5, bottom=bottom, **shade)
        else:
            axes.fill_between(x[at], bottom[at], top[at], **shade)
            axes.plot(x[at], top[at], color=colour("page"), linewidth=1)
        bottom = top
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 25, 50, 75, 100], ["0%", "25%", "50%", "75%", "100%"])
    if len(steps) == 1:
        axes.set_xlim(-1, 1)
        axes.set_xticks([0], [f"step {steps[0]}"])
    else:
        axes.margins(x=0)
        step_axis(axes, steps[-1])


def draw_lines(axes: "Axes", lines: Sequence[Line]) -> None:
    """Draw groups: the mean of the metric on dev against forwards, a band of one std, and marks for the test scores.

    To the right of the curves stand our test score (filled, with its std) and the paper's (hollow).
    """
    furthest = max(int(line.forwards[-1]) for line in lines) or 1
    shown = list(enumerate(lines[:SHOWN_LINES]))
    marks = [(number, line) for number, line in shown if line.test is not None or line.paper is not None]
    for number, line in reversed(list(enumerate(lines))):
        name = series_name(number) if number < SHOWN_LINES else "quiet"
        at = thin_indices(len(line.forwards), CURVE_POINTS)
        x, mean, std = line.forwards[at], 100 * line.mean[at], 100 * line.std[at]
        if np.any(std > 0):
            axes.fill_between(x, mean - std, mean + std, color=colour(name), alpha=0.16, linewidth=0)
        dots: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4} if len(at) <= 25 else {}
        axes.plot(x, mean, color=colour(name), linewidth=1.8 if number < SHOWN_LINES else 0.8, **dots)
    for place, (number, line) in enumerate(marks):
        name, x = series_name(number), furthest * (1.06 + 0.035 * place)
        if line.test is not None:
            error = None if line.test_std is None else [100 * line.test_std]
            shape: dict[str, Any] = {"fmt": "D", "markersize": 5, "color": colour(name), "elinewidth": 1.2}
            axes.errorbar([x], [100 * line.test], error, **shape)
        if line.paper is not None:
            inside, edge = colour("page"), colour(name)
            axes.plot([x], [line.paper], "D", zorder=1.9, markersize=7, mfc=inside, mec=edge, mew=1.5)
    axes.set_xlim(-0.03 * furthest, furthest * (1.1 + 0.035 * len(marks)) if marks else 1.03 * furthest)
    percent_axis(axes)
    step_axis(axes, furthest, "forwards")


def series_name(number: int) -> str:
    """Return the colour of a series; after the last the first comes again."""
    return SERIES[number % len(SERIES)]


# --- axes ---


def step_axis(axes: "Axes", last: int, label: str = "step") -> None:
    """Label the axis of steps or forwards, up to the last one."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(label, loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    if last == 0:
        axes.set_xlim(-1, 1)
        axes.set_xticks([0], ["0"])


def percent_axis(axes: "Axes") -> None:
    """Label the vertical axis in percent."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))


def count_axis(axes: "Axes") -> None:
    """Label the vertical axis of counts or rates, from zero."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))


def short_count(value: float) -> str:
    """Return a count in short: 500, 20k, 1.5M."""
    for unit, sign in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if sign == 'k' else unit):g}{sign}"
    return f"{value:g}"


def label_text(text: str) -> str:
    """Return a text of the user's for a legend, which drops labels that begin with an underscore."""
    shown = printable(" ".join(text.split()))
    return f" {shown}" if shown.startswith("_") else shown
