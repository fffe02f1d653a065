"""Draw the table of numbers (frame.py) with matplotlib: `curve`, `bars` and `hist`; as SVG for a page, or for a paper.

The colours in a page are those of its style sheet, the colours of a figure for a paper those of the page on white.
"""

import io
import logging
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from mezo_cli.console import printable
from mezo_cli.errors import UserError
from mezo_cli.optim import optimizer_class
from mezo_cli.report.document import projected_grads, thin_indices
from mezo_cli.report.frame import Entry
from mezo_cli.report.groups import Group, format_shots
from mezo_cli.report.output import make_table, write_output
from mezo_cli.report.settings import format_mean, format_score, is_fraction, scale

if TYPE_CHECKING:  # matplotlib is imported when a figure is drawn
    from matplotlib.axes import Axes

# Name of a variable of the style sheet -> colour on white and on black. Each is distinct: SVG is coloured by replacing
# the first by the variable. The six of the series differ in lightness too, for readers who see no hue.
COLOURS = {
    "ink": ("#1d1e20", "#e8e6e1"),
    "quiet": ("#5c6066", "#a3a8b0"),
    "rule": ("#dcdad3", "#33373e"),
    "page": ("#fcfbf8", "#15171a"),
    "c1": ("#1f5fbf", "#78aefc"),
    "c2": ("#c04a0a", "#ff9c5e"),
    "c3": ("#0d7a5c", "#4ecba5"),
    "c4": ("#8a3f9e", "#d694ec"),
    "c5": ("#8a6a00", "#e2bd55"),
    "c6": ("#b01f5c", "#ff8ab5"),
}
SERIES = ("c1", "c2", "c3", "c4", "c5", "c6")
MARKERS = ("o", "s", "^", "D", "v", "P")  # of the series; the template shows the same
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": COLOURS["rule"][0],
    "axes.labelcolor": COLOURS["quiet"][0],
    "text.color": COLOURS["ink"][0],
    "xtick.color": COLOURS["quiet"][0],
    "ytick.color": COLOURS["quiet"][0],
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": COLOURS["rule"][0],
    "grid.linewidth": 0.8,
    "ytick.left": False,
    "xtick.bottom": False,
    "lines.solid_capstyle": "round",
}
PAPER_STYLE = {"svg.fonttype": "path", "pdf.fonttype": 42, "font.size": 8, "figure.dpi": 300, "savefig.dpi": 300}
FORMATS = (".svg", ".pdf", ".png")  # of a figure for a paper
COLUMN, ROW = 3.3, 2.3  # inches: a column of a two-column paper, and the height of a panel
LEGEND = 40  # characters in a line of a legend
SIZE, WIDE = (400, 240), (440, 280)  # of a figure in a page, in SVG units
MARGINS = (46, 14, 40, 22)  # left, right, bottom, top
SHOWN_LABELS = 6  # in the figure of predictions; the rest are counted together
CURVE_POINTS = 240  # at most, of a noisy curve
TABLE_ROWS = 24  # at most, in a table behind a figure
FEWEST = 10  # values that are smoothed at all
SMOOTHING = 20  # a smoothed point is the mean over about this fraction (1/20) of the curve
ROUNDING = 1e-9  # of the greatest size: what is smaller came of rounding, and is counted beside the histogram
FEW = 40  # points up to which each is marked
Curve = TypeVar("Curve", pd.Series, pd.DataFrame)


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


# --- what is drawn ---


def curve(axes: "Axes", rows: pd.DataFrame, series: str, **style: Any) -> None:
    """Draw the values of some rows over their index, and the band from `low` to `high` where they have one."""
    if rows["low"].notna().any():
        axes.fill_between(rows.index, rows["low"], rows["high"], color=colour(series), alpha=0.2, linewidth=0)
    dots = {"marker": "o", "markersize": 4} if len(rows) <= FEW else {}
    axes.plot(rows.index, rows["value"], color=colour(series), **{"linewidth": 2, **dots, **style})


def bars(axes: "Axes", fractions: pd.DataFrame) -> None:
    """Draw fractions, a column each, that fill the height at every step."""
    drawn = fractions if len(fractions) > 1 else fractions.loc[[*fractions.index] * 2].set_axis([-0.5, 0.5])
    colours = [colour(series_name(number)) for number in range(fractions.shape[1])]
    axes.stackplot(drawn.index, 100 * drawn.T, colors=colours, alpha=0.85, linewidth=0)
    axes.margins(x=0)
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:g}%")


def hist(axes: "Axes", sizes: np.ndarray) -> Iterator[tuple[str, int]]:
    """Draw positive values in about sqrt(n) bins, 6 to 30, of equal width on a logarithmic scale; yield the bins."""
    from matplotlib.ticker import MaxNLocator

    low, high = float(sizes.min()), float(sizes.max())
    if high / low < 1.01:
        low, high = low / 1.1, high * 1.1
    edges = np.geomspace(low, high, min(30, max(6, int(np.sqrt(sizes.size)))) + 1)
    edges[0], edges[-1] = low, high  # as rounding may put the ends inside
    counts = np.histogram(sizes, edges)[0]
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=colour("c4"), edgecolor=colour("page"), lw=0.8)
    axes.set_xscale("log")
    ticks = [10.0**power for power in range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    ticks = ticks[:: max(1, -(-len(ticks) // 6))]  # at most six, so that their labels have room
    if len(ticks) < 2:
        ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 3)})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: short_count(value))
    for at, count in enumerate(counts.tolist()):
        yield f"{edges[at]:.3g} to {edges[at + 1]:.3g}", count


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


def short_count(value: float) -> str:
    """Return a count in short: 500, 20k, 1.5M."""
    for unit, sign in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if sign == 'k' else unit):g}{sign}"
    return f"{value:g}"


# --- one run ---


def run_figures(run: Entry, table: pd.DataFrame, name: str) -> list[Figure]:
    """Return the figures of a run, of its rows of the table. `name` is unique in the page."""
    batches, dev = _by_step(table, "batch"), table[table.split == "dev"]
    wide = dev.pivot_table(index="step", columns="metric", values="value", sort=False)
    labels = [metric for metric in wide if metric.startswith("predicted ")]
    gradients = projected_grads(run)
    with drawing():
        found = [_batch_figure(batches, wide, f"{name}-batch")] if len(batches) else []
        found += [_dev_figure(run, wide.drop(columns=labels), f"{name}-dev")] if len(wide) else []
        found += [_label_figure(wide[labels], f"{name}-labels")] if labels else []
        found += [_gradient_figure(run, gradients, f"{name}-sizes")] if gradients is not None else []
    return found


def _by_step(table: pd.DataFrame, split: str) -> pd.DataFrame:
    return table[table.split == split].set_index("step")


def _batch_figure(rows: pd.DataFrame, dev: pd.DataFrame, name: str) -> Figure:
    axes, metric = new_axes(), rows["metric"].iloc[0]
    smooth, note = draw_batches(axes, rows)
    columns, legend = {metric: rows["value"], "smoothed": smooth["value"]}, []
    if metric == "reward":
        columns = {metric: rows["value"], "least": rows["low"], "greatest": rows["high"]}
        note = f"The band is from the least to the greatest reward of the members of a step. {note}"
        legend = [("c1", "train, mean of the members")]
        if metric in dev:
            curve(axes, pd.DataFrame({"value": dev[metric], "low": np.nan}), "c3")
            legend.append(("c3", "dev"))
    ends = " to ".join(f"{smooth['value'].iloc[at]:.4g}" for at in (0, -1))
    title = "Reward" if metric == "reward" else "Training loss"
    svg = inline_svg(axes, name, f"{title} over steps, from {ends}")
    return Figure(title, note, svg, _numbers(pd.DataFrame(columns)), legend)


def draw_batches(axes: "Axes", rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Draw the values of the steps thin and, over them, their mean over neighbours; return it, and what is what."""
    smooth, window = smoothed(rows[["value", "low", "high"]].astype(float))
    has_band = smooth["low"].notna().any()
    if window > 1 and not has_band:
        axes.plot(extremes(rows["value"]), color=colour("c1"), alpha=0.5, linewidth=0.8)
    shown = smooth.iloc[thin_indices(len(smooth), CURVE_POINTS)]
    curve(axes, shown, "c1", **({} if window == 1 else {"marker": ""}))
    step_axis(axes, int(rows.index[-1]))
    lines = "Lines: means" if has_band else "Thin: as logged. Thick: the mean"
    return smooth, f"{lines} of {window} neighbouring values." if window > 1 else ""


def _dev_figure(run: Entry, dev: pd.DataFrame, name: str) -> Figure:
    axes, metric = new_axes(), run.metric
    best = draw_dev(axes, run, dev)
    title, start = f"{metric.capitalize()} on dev", format_score(metric, dev[metric].iloc[0], "%")
    note = f"Dashed: {start} before the first step. Best: {best}."
    order = sorted(dev, key=lambda name: (name == "loss", name != metric))
    shown = {f"{name}{' %' * is_fraction(name)}": scale(name) * dev[name] for name in order}
    return Figure(title, note, inline_svg(axes, name, f"{title} over steps. {note}"), _numbers(pd.DataFrame(shown)))


def draw_dev(axes: "Axes", run: Entry, dev: pd.DataFrame) -> str:
    """Draw the metric on dev, its first value as a level, its best marked; return the best in words."""
    assert run.best is not None
    scores, at = scale(run.metric) * dev[run.metric], run.best["step"]
    best = format_score(run.metric, run.best[run.metric], "%")
    axes.axhline(scores.iloc[0], color=colour("quiet"), linewidth=1, linestyle=(0, (4, 3)))
    curve(axes, pd.DataFrame({"value": scores, "low": np.nan}), "c3")
    place = (at, scale(run.metric) * run.best[run.metric])
    axes.plot(*place, "o", markersize=9, markerfacecolor=colour("page"), markeredgecolor=colour("c3"), mew=2)
    axes.margins(y=0.16)
    late = at > 0.6 * max(dev.index[-1], 1)
    side: dict[str, Any] = {"ha": "right", "xytext": (8, 9)} if late else {"ha": "left", "xytext": (-8, 9)}
    axes.annotate(f"best {best}", place, textcoords="offset points", weight="bold", **side)
    score_axis(axes, run.metric)
    step_axis(axes, dev.index[-1])
    return f"{best} at step {at}"


def _label_figure(fractions: pd.DataFrame, name: str) -> Figure:
    """Return the figure of the most predicted labels, and of all others together."""
    fractions = fractions.fillna(0.0).rename(columns=lambda metric: metric.removeprefix("predicted "))
    if fractions.shape[1] > SHOWN_LABELS:
        kept = fractions.sum().sort_values(ascending=False, kind="stable").index[: SHOWN_LABELS - 1]
        rest = fractions.drop(columns=kept)
        fractions = fractions[kept].assign(**{f"{rest.shape[1]} other labels": rest.sum(axis=1)})
    axes = new_axes()
    bars(axes, fractions)
    step_axis(axes, fractions.index[-1])
    svg = inline_svg(axes, name, "Share of the dev rows predicted as each label, over steps")
    note = "The share of the dev rows that get each label. One band that fills the height is a collapse."
    legend = [(series_name(number), str(label)) for number, label in enumerate(fractions)]
    return Figure("Predictions per label", note, svg, _numbers((100 * fractions).add_suffix(" %")), legend)


def _gradient_figure(run: Entry, gradients: np.ndarray, name: str) -> Figure:
    optimizer, sizes = optimizer_class(run.config.optimizer), np.abs(gradients.astype(np.float64)).ravel()
    size, words = f"|{optimizer.symbol}|", optimizer.scalar.replace("grad", "gradient").replace("_", " ")
    zeros, tiny = int((sizes == 0).sum()), int(((sizes > 0) & (sizes <= sizes.max() * ROUNDING)).sum())
    svg, rows = "", [{size: "0", "samples": f"{zeros:,}"}]
    note = f"{zeros:,} of {sizes.size:,} are exactly 0 ({100 * zeros / sizes.size:.1f}%)"
    note += f"; {tiny:,} of less than {ROUNDING:g} of the greatest are not drawn" if tiny else ""
    if zeros < sizes.size:
        axes = new_axes()
        bins = hist(axes, sizes[sizes > sizes.max() * ROUNDING])
        rows += [{size: ends, "samples": f"{count:,}"} for ends, count in bins]
        axes.set_xlabel(size, loc="right")
        svg = inline_svg(axes, name, f"Histogram of the sizes of the {words}s. {note}")
    note += f"; mean {sizes.mean():.3g}, from {sizes.min():.3g} to {sizes.max():.3g}."
    return Figure(f"Size of the {words} {size}", note, svg, make_table("", rows))


def _numbers(columns: pd.DataFrame) -> pd.DataFrame:
    """Return the table behind a figure: some of the steps (the index), the first and the last among them."""
    shown = columns.iloc[thin_indices(len(columns), TABLE_ROWS)]
    texts = shown.map("{:.4g}".format)
    texts.insert(0, "step", [f"{step:,}" for step in shown.index])
    return make_table("", texts, left=0)


# --- groups against forwards ---


@dataclass(frozen=True)
class Line:
    """The metric on dev of a group, over its data seeds.

    Attributes:
        label: what distinguishes the group from the others of its panel.
        group: the group; its test score and the paper's number stand beside the curve.
        rows: a row per step at which runs were evaluated; the index is the forwards of a batch. value (the mean), low
            and high (one population std from it) of the metric as it is shown, std, runs (how many).
    """

    label: str
    group: Group
    rows: pd.DataFrame


def panels(groups: Sequence[Group], table: pd.DataFrame) -> dict[str, list[Line]]:
    """Return title -> lines of one panel per task, metric and kind of data, without groups that were never evaluated.

    A line is over the runs that `compare` picks; over all runs of a group as long as none has finished.
    """
    dev = dict(iter(table[table.split == "dev"].groupby("group")))
    by_title: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.entries[0].group in dev:
            by_title[f"{group.task}{' (demo data)' if group.demo else ''}: {group.metric} on dev"].append(group)
    return {
        title: [Line(_label(group, members), group, _line(group, dev[group.entries[0].group])) for group in members]
        for title, members in by_title.items()
    }


def _line(group: Group, rows: pd.DataFrame) -> pd.DataFrame:
    picked = {entry.location for entries in group.picks.entries for entry in entries}
    rows = rows[(rows.metric == group.metric) & (rows.run.isin(picked) | (not picked))]
    steps = rows.assign(value=scale(group.metric) * rows.value).groupby("step")
    values, std = steps["value"].mean(), steps["value"].std(ddof=0)
    columns = {"forwards": steps["forwards"].mean(), "value": values, "std": std, "runs": steps.size()}
    band = {"low": values - std, "high": values + std} if std.any() else {"low": np.nan, "high": np.nan}
    return pd.DataFrame({**columns, **band}).set_index("forwards")


def _label(group: Group, members: Sequence[Group]) -> str:
    """Return the group's label, with what else differs between the groups of its panel."""

    def parts(one: Group) -> list[str]:
        return [one.model, one.objective, one.loss, format_shots(one.shots), f"{one.steps:,} steps"]

    all_parts = zip(parts(group), *map(parts, members), strict=True)
    return ", ".join([group.label, *(own for own, *others in all_parts if len(set(others)) > 1)])


def panel_figure(title: str, lines: Sequence[Line], name: str) -> Figure:
    """Return the figure of a panel."""
    with drawing():
        axes = new_axes(WIDE)
        draw_lines(axes, lines)
        svg = inline_svg(axes, name, f"{title} against forwards, one line per group")
    tables = []
    for line in lines:
        shown = line.rows.iloc[thin_indices(len(line.rows), TABLE_ROWS // 2)].reset_index()
        texts = {"forwards": shown["forwards"].map("{:,.0f}".format), "mean": shown["value"].map("{:.1f}".format)}
        texts |= {"std": shown["std"].map("{:.1f}".format), "runs": shown["runs"].astype(str)}
        tables.append(pd.DataFrame({"group": line.label, **texts}))
    several = any(line.rows["low"].notna().any() for line in lines)
    note = "Lines: mean over the seeds" + (", with a band of one standard deviation." if several else ".")
    if any(line.group.mean is not None for line in lines):
        note += " Filled diamonds: test at the best checkpoint."
    if any(line.group.paper_number is not None for line in lines):
        note += " Hollow diamonds: the paper's test score."
    return Figure(title, note, svg, make_table("", pd.concat(tables)), panel_legend(lines))


def panel_legend(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return (colour name, text) of each line; those that have no colour of their own are counted."""
    legend = []
    for number, line in enumerate(lines[: len(SERIES)]):
        mean, paper = line.group.mean, line.group.paper_number
        test = "" if mean is None else f": test {format_mean(line.group.metric, mean, line.group.std)}"
        text = f"{line.label}{test}{'' if paper is None else f', paper {paper.text}'}"
        legend.append((series_name(number), text))
    rest = len(lines) - len(SERIES)
    return legend + ([("quiet", f"{rest} more, in the table")] if rest > 0 else [])


def draw_lines(axes: "Axes", lines: Sequence[Line]) -> None:
    """Draw groups: the mean of the metric on dev against forwards, a band of one std, and marks for the test scores.

    To the right of the curves stand our test score (filled, with its std) and the paper's (hollow).
    """
    furthest = max(line.rows.index.max() for line in lines) or 1
    for number, line in reversed(list(enumerate(lines))):
        name = series_name(number) if number < len(SERIES) else "quiet"
        marker = MARKERS[number % len(MARKERS)] if len(line.rows) <= FEW else ""
        curve(axes, line.rows, name, linewidth=0.8 if name == "quiet" else 1.8, marker=marker)
    x = 1.06 * furthest
    for number, line in enumerate(lines[: len(SERIES)]):
        x += 0.035 * furthest * _draw_scores(axes, line.group, x, colour(series_name(number)))
    axes.set_xlim(-0.03 * furthest, x if x > 1.06 * furthest else 1.03 * furthest)
    score_axis(axes, lines[0].group.metric)
    step_axis(axes, int(furthest), "forwards")


def _draw_scores(axes: "Axes", group: Group, x: float, shade: str) -> bool:
    """Draw a group's test score and the paper's at a place; return whether there is one."""
    if group.mean is not None:
        factor = scale(group.metric)
        error = None if group.std is None else [factor * group.std]
        axes.errorbar([x], [factor * group.mean], error, fmt="D", markersize=5, color=shade, elinewidth=1.2)
    if group.paper_number is not None:
        axes.plot([x], [group.paper_number.mean], "D", zorder=1.9, ms=7, mfc=colour("page"), mec=shade, mew=1.5)
    return group.mean is not None or group.paper_number is not None


# --- for a paper ---


def paper_figure(runs: Sequence[Entry], table: pd.DataFrame, shown: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Write one figure for a paper, in the colours on white: of one run its loss and dev metric, else the panels.

    It holds no date, so that the same runs give the same file.
    """
    from matplotlib.figure import Figure as Sheet

    if not shown:
        raise UserError("--figure: no run here has been evaluated yet, so there is nothing to draw")
    with drawing(**PAPER_STYLE, **{"svg.hashsalt": "mezo"}):
        sheet = Sheet((2 * COLUMN, (1 if len(runs) == 1 else len(shown)) * ROW), layout="constrained")
        if len(runs) == 1:
            batches, dev = _by_step(table, "batch"), _by_step(table, "dev")
            places = sheet.subplots(1, 2 if len(batches) else 1, squeeze=False)[0]
            if len(batches):
                draw_batches(places[0], batches)
                metric = batches["metric"].iloc[0]
                places[0].set_title("training loss" if metric == "loss" else f"{metric} in training", loc="left")
            draw_dev(places[-1], runs[0], dev.pivot(columns="metric", values="value"))
            places[-1].set_title(f"{runs[0].metric} on dev", loc="left")
        else:
            for axes, (title, lines) in zip(
                sheet.subplots(len(shown), squeeze=False)[:, 0], shown.items(), strict=True
            ):
                _draw_panel(axes, title, lines)
        file, undated = io.BytesIO(), {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
        sheet.savefig(file, format=path.suffix[1:], metadata=undated[path.suffix])
    write_output(path, file.getvalue(), "--figure")


def _draw_panel(axes: "Axes", title: str, lines: Sequence[Line]) -> None:
    """Draw a panel, its legend beside it."""
    draw_lines(axes, lines)
    axes.set_title(_label_text(title), loc="left", parse_math=False)
    entries, signs = panel_legend(lines), dict(zip(SERIES, MARKERS, strict=True))
    handles = [axes.plot([], [], signs.get(name, ""), ls="-", color=colour(name), ms=4)[0] for name, _ in entries]
    texts = [textwrap.fill(_label_text(text), LEGEND) for _, text in entries]
    legend = axes.legend(handles, texts, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _label_text(text: str) -> str:
    """Return a text of the user's for a legend, which drops labels that begin with an underscore."""
    shown = printable(" ".join(text.split()))
    return f" {shown}" if shown.startswith("_") else shown


# --- matplotlib ---


def colour(name: str) -> str:
    """Return a colour of the style sheet as it is on white."""
    return COLOURS[name][0]


def series_name(number: int) -> str:
    """Return the name of a series' colour; after the last the first comes again."""
    return SERIES[number % len(SERIES)]


@contextmanager
def drawing(**style: Any) -> Iterator[None]:
    """Draw with the style of the pages inside the block, whatever the user's matplotlibrc says."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # of fonts and caches, which do not matter here
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | style)
        yield


def new_axes(size: tuple[int, int] = SIZE) -> "Axes":
    """Return the axes of a new figure for a page. Must be called inside `drawing`."""
    from matplotlib.figure import Figure as Sheet
    from matplotlib.ticker import MaxNLocator

    (width, height), (left, right, bottom, top) = size, MARGINS
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    axes = Sheet((width / 72, height / 72)).add_axes(box)
    axes.margins(x=0.02)
    axes.xaxis.labelpad = 2
    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    return axes


def inline_svg(axes: "Axes", name: str, label: str) -> str:
    """Return the figure of some axes as an SVG element for a page: matplotlib's, with the colours as CSS variables.

    Args:
        axes: as `new_axes` made them.
        name: unique in the page; the ids that are referred to inside the SVG follow from it.
        label: what the figure shows, for readers who do not see it.
    """
    import matplotlib

    figure: Any = axes.figure
    file, undated = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=undated)
    text = file.getvalue()
    for variable, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{variable})")
    head = f'<svg class="plot" role="img" aria-label="{escape(printable(label))}"'
    return head + text[text.index("<svg") + len("<svg") :]
