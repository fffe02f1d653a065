"""Draw runs, and the curves of groups of runs, with matplotlib: as SVG for a page, or for a paper.

The colours in a page are those of its style sheet, the colours of a figure for a paper those of the page on white.
"""

import io
import logging
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from mezo_cli.console import printable
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS
from mezo_cli.report.document import projected_grads, thin
from mezo_cli.report.entries import Entry, predicted_fractions
from mezo_cli.report.groups import Group
from mezo_cli.report.settings import format_mean
from mezo_cli.runs.atomic import write_output
from mezo_cli.runs.contents import format_score, is_fraction, metrics_of, scale

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
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
SERIES = ("c1", "c2", "c3", "c4", "c5", "c6")
MARKERS = ("o", "s", "^", "D", "v", "P")  # of the series; the template shows the same
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": LIGHT["ink"],
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), LIGHT["quiet"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), LIGHT["rule"]),
    **dict.fromkeys(("axes.spines.left", "axes.spines.top", "axes.spines.right", "ytick.left", "xtick.bottom"), False),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    "axes.grid.axis": "y",
    "grid.linewidth": 0.8,
    "axes.xmargin": 0.02,
    "path.simplify_threshold": 1.0,  # of a noisy curve: about as many points as the figure is wide
    "lines.solid_capstyle": "round",
}
PAPER_STYLE = {"svg.fonttype": "path", "pdf.fonttype": 42, "font.size": 8, "figure.dpi": 300, "savefig.dpi": 300}
FORMATS = (".svg", ".pdf", ".png")  # of a figure for a paper
COLUMN, ROW = 3.3, 2.3  # inches: a column of a two-column paper, and the height of a panel
LEGEND = 40  # characters in a line of a legend
SIZE, WIDE = (400, 240), (440, 280)  # of a figure in a page, in SVG units
MARGINS = (46, 14, 40, 22)  # left, right, bottom, top
CURVE_POINTS = 240  # at most, of a smoothed curve
FEWEST = 10  # values that are smoothed at all
SMOOTHING = 20  # a smoothed point is the mean over about this fraction (1/20) of the curve
ROUNDING = 1e-9  # of the greatest size: what is smaller came of rounding, and is not drawn
FEW = 40  # points up to which each is marked


class Drawn(NamedTuple):
    """What is said about a drawing."""

    title: str
    note: str  # on what is seen in it or how it was computed; may be empty
    legend: Sequence[tuple[str, str]] = ()  # (colour name, text) of each series; none of a single one


Line = tuple[Group, pd.DataFrame]  # of a panel: see `panels`


def curve(axes: "Axes", rows: pd.DataFrame, series: str, **style: Any) -> None:
    """Draw the values of some rows over their index, and the band from `low` to `high` where they have one."""
    if "low" in rows and rows["low"].notna().any():
        axes.fill_between(rows.index, rows["low"], rows["high"], color=LIGHT[series], alpha=0.2, linewidth=0)
    dots = {"marker": "o", "markersize": 4} if len(rows) <= FEW else {}
    axes.plot(rows.index, rows["value"], color=LIGHT[series], **{"linewidth": 2, **dots, **style})


def step_axis(axes: "Axes", label: str = "step") -> None:
    """Label the axis of steps or forwards."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel(label, loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def score_axis(axes: "Axes", metric: str) -> None:
    """Label the vertical axis of a metric: in percent and up to 100, if it is a fraction. Called after drawing."""
    if is_fraction(metric):
        axes.yaxis.set_major_formatter("{x:g}%")
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= min(high, 100)])


# --- one run ---


def run_figures(run: Entry, name: str) -> list[dict[str, Any]]:
    """Return the figures of a run. `name` is unique in the page."""
    steps = [line["step"] for line in run.dev]
    dev = pd.DataFrame([metrics_of(line) for line in run.dev], steps)
    fractions = pd.DataFrame([predicted_fractions(line) for line in run.dev], steps)
    gradients = projected_grads(run)
    parts: list[tuple[Any, ...]] = [
        ("batch", run.metrics[0], draw_batches, run.metrics[0], dev),
        ("dev", steps, draw_dev, run, dev),
        ("labels", 0 < len(fractions.columns) <= len(SERIES), draw_labels, fractions),
        ("sizes", gradients is not None, draw_gradients, run, gradients),
    ]
    return [page_figure(f"{name}-{part}", SIZE, draw, *what) for part, applies, draw, *what in parts if applies]


def draw_batches(axes: "Axes", logged: Mapping[str, np.ndarray], dev: pd.DataFrame) -> Drawn:
    """Draw the values of the steps thin and, over them, their mean over neighbours; of a reward the band, and dev."""
    is_reward = "reward_max" in logged
    names = {"value": "reward", "low": "reward_min", "high": "reward_max"} if is_reward else {"value": "loss"}
    rows = pd.DataFrame({column: logged[name] for column, name in names.items()}, logged["step"])
    window = 2 * max(len(rows) // (2 * SMOOTHING), 1) + 1 if len(rows) >= FEWEST else 1
    smooth = rows.rolling(window, center=True, min_periods=1).mean()
    if window > 1 and not is_reward:
        axes.plot(rows["value"], color=LIGHT["c1"], alpha=0.5, linewidth=0.8)
    curve(axes, smooth.iloc[thin(range(len(smooth)), CURVE_POINTS)], "c1", **({"marker": ""} if window > 1 else {}))
    step_axis(axes)
    if not is_reward:
        note = f"Thin: as logged. Thick: the mean of {window} neighbouring values." if window > 1 else ""
        return Drawn("Training loss", note)
    note = "The band is from the least to the greatest reward of the members of a step."
    note += f" Lines: means of {window} neighbouring values." * (window > 1)
    legend = [("c1", "train, mean of the members")]
    if "reward" in dev:
        curve(axes, pd.DataFrame({"value": dev["reward"]}), "c3")
        legend.append(("c3", "dev"))
    return Drawn("Reward", note, legend)


def draw_dev(axes: "Axes", run: Entry, dev: pd.DataFrame) -> Drawn:
    """Draw the metric on dev, its first value as a level, its best marked."""
    assert run.best is not None
    metric, at, best = run.metric, run.best["step"], format_score(run.metric, run.best[run.metric], "%")
    scores, place = scale(metric) * dev[metric], (at, scale(metric) * run.best[metric])
    axes.axhline(scores.iloc[0], color=LIGHT["quiet"], linewidth=1, linestyle="--")
    curve(axes, pd.DataFrame({"value": scores}), "c3")
    axes.plot(*place, "o", markersize=9, markerfacecolor=LIGHT["page"], markeredgecolor=LIGHT["c3"], mew=2)
    axes.margins(y=0.16)
    side, x = ("right", 8) if at > 0.6 * dev.index[-1] else ("left", -8)
    axes.annotate(f"best {best}", place, (x, 9), textcoords="offset points", weight="bold", ha=side)
    score_axis(axes, metric)
    step_axis(axes)
    note = f"Dashed: {format_score(metric, dev[metric].iloc[0], '%')} before the first step. Best: {best} at step {at}."
    return Drawn(f"{metric.capitalize()} on dev", note)


def draw_labels(axes: "Axes", fractions: pd.DataFrame) -> Drawn:
    """Draw the shares of the predicted labels, which fill the height at every step."""
    fractions = fractions.fillna(0.0)
    drawn = fractions if len(fractions) > 1 else fractions.loc[[*fractions.index] * 2].set_axis([-0.5, 0.5])
    axes.stackplot(drawn.index, 100 * drawn.T, colors=[LIGHT[name] for name in SERIES], alpha=0.85, linewidth=0)
    axes.margins(x=0)
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:g}%")
    step_axis(axes)
    note = "The share of the dev rows that get each label. One band that fills the height is a collapse."
    return Drawn("Predictions per label", note, [*zip(SERIES, map(str, fractions), strict=False)])


def draw_gradients(axes: "Axes", run: Entry, gradients: np.ndarray) -> Drawn:
    """Draw the sizes of the projected gradients, of all that are not 0, in bins of one width on a logarithmic scale."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    optimizer = OPTIMIZERS.implementation(run.config.optimizer.name)
    sizes = np.abs(gradients.astype(np.float64)).ravel()
    size, words = f"|{optimizer.symbol}|", optimizer.scalar.replace("grad", "gradient").replace("_", " ")
    drawn, zeros = sizes[sizes > sizes.max() * ROUNDING], int((sizes == 0).sum())
    note = f"{zeros:,} of {sizes.size:,} are exactly 0 ({100 * zeros / sizes.size:.1f}%)"
    note += f"; mean {sizes.mean():.3g}, from {sizes.min():.3g} to {sizes.max():.3g}."
    if drawn.size:
        low, high = drawn.min() / 1.01, drawn.max() * 1.01  # as rounding may put the ends outside
        edges = np.geomspace(low, high, min(30, max(6, int(np.sqrt(drawn.size)))) + 1)
        axes.hist(drawn, edges.tolist(), color=LIGHT["c4"], edgecolor=LIGHT["page"], lw=0.8)
        ticks = sorted({f"{tick:.2g}" for tick in np.geomspace(low, high, 4)}, key=float)
        axes.set_xscale("log")
        axes.set_xticks([*map(float, ticks)], [f"{float(tick):g}" for tick in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(size, loc="right")
    return Drawn(f"Size of the {words} {size}", note)


# --- groups against forwards, or seconds ---


def panels(groups: Sequence[Group]) -> dict[str, list[Line]]:
    """Return title -> lines of one panel per task, metric and kind of data, without groups that were never evaluated.

    A line is a group and a row for each step at which its runs were evaluated on dev: those that `compare` picks, all
    as long as none has finished. The index is the forwards of a batch, or beside backpropagation the seconds; value
    (the mean), low and high (one std of the population from it, where it is above 0) of the metric as it is shown.
    """
    found = defaultdict(list)
    for group in groups:
        rows = [
            (line["step"], run.forwards(line["step"]), line["seconds"], scale(group.metric) * line[group.metric])
            for run in group.results or group.entries
            for line in run.dev
        ]
        if not rows:
            continue
        steps = pd.DataFrame(rows, columns=["step", "forwards", "seconds", "value"]).groupby("step")
        line, std = steps.mean(), steps["value"].std(ddof=0)
        if std.any():
            line = line.assign(low=line["value"] - std, high=line["value"] + std)
        title = f"{group.task}{' (demo data)' if group.demo else ''}: {group.metric} on dev"
        found[title].append((group, line))
    for title, lines in found.items():
        kinds = {group.config.optimizer.needs_backward for group, _ in lines}
        axis, other = ("seconds", "forwards") if len(kinds) > 1 else ("forwards", "seconds")
        found[title] = [(group, line.set_index(axis).drop(columns=other)) for group, line in lines]
    return found


def draw_lines(axes: "Axes", title: str, lines: Sequence[Line]) -> Drawn:
    """Draw groups: the mean of the metric on dev, a band of one std, and marks for the test scores.

    To the right of the curves stand our test score (filled, with its std) and the paper's (hollow). A dashed line is
    what the untrained model scores on dev at a moved threshold, the best of those that are known.
    """
    furthest, metric = max(rows.index.max() for _, rows in lines) or 1, lines[0][0].metric
    x, legend, factor = 1.06 * furthest, [], scale(metric)
    for number, (group, rows) in enumerate(lines):
        if number >= len(SERIES):
            curve(axes, rows, "quiet", linewidth=0.8, marker="", zorder=1.5)
            continue
        text, of_paper, name = group.title.removeprefix(f"{group.task} "), group.paper_number, SERIES[number]
        if group.mean is not None:
            text += f": test {format_mean(group.metric, group.mean, group.std)}"
            error = None if group.std is None else [factor * group.std]
            axes.errorbar([x], [factor * group.mean], error, fmt="D", ms=5, color=LIGHT[name], elinewidth=1.2)
        if of_paper is not None:
            text += f", paper {of_paper.text}"
            axes.plot([x], [of_paper.mean], "D", zorder=1.9, ms=7, mfc=LIGHT["page"], mec=LIGHT[name], mew=1.5)
        marker = MARKERS[number] if len(rows) <= FEW else ""
        label = textwrap.fill(_plain(text), LEGEND)
        curve(axes, rows, name, linewidth=1.8, marker=marker, zorder=2 - number / 1000, label=label)
        x += 0.035 * furthest * (group.mean is not None or of_paper is not None)
        legend.append((name, text))
    biased = [run.summary.get("baselines") or {} for group, _ in lines for run in group.results]
    if moved := [of["dev"][metric] for each in biased for of in each.values() if metric in of.get("dev", {})]:
        text = f"the untrained model at a moved threshold: dev {format_mean(metric, max(moved), None)}"
        axes.axhline(factor * max(moved), color=LIGHT["quiet"], linestyle="--", linewidth=1, label=text, zorder=1)
        legend.append(("quiet", text))
    axes.set_xlim(-0.03 * furthest, x if x > 1.06 * furthest else 1.03 * furthest)
    score_axis(axes, metric)
    step_axis(axes, str(lines[0][1].index.name))
    if rest := [group.title.removeprefix(f"{group.task} ") for group, _ in lines[len(SERIES) :]]:
        more = f" and {len(rest) - len(SERIES)} more" if len(rest) > len(SERIES) else ""
        legend.append(("quiet", f"thin: {', '.join(rest[: len(SERIES)])}{more}"))
    note = "Lines: mean over the seeds, with a band of one standard deviation. Filled diamonds: test at the best"
    note += " checkpoint. Hollow diamonds: the paper's test score."
    return Drawn(title, note, legend)


# --- for a paper ---


def paper_figure(shown: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Write the panels as one figure for a paper, in the colours on white.

    It holds no date, so that the same runs give the same file.
    """
    from matplotlib.figure import Figure as Sheet

    if not shown:
        raise UserError("--figure: no run here has been evaluated yet, so there is nothing to draw")
    with drawing(**PAPER_STYLE, **{"svg.hashsalt": "mezo"}):
        sheet = Sheet((2 * COLUMN, len(shown) * ROW), layout="constrained")
        for axes, (title, lines) in zip(sheet.subplots(len(shown), squeeze=False).flat, shown.items(), strict=True):
            draw_lines(axes, title, lines)
            axes.set_title(_plain(title), loc="left", parse_math=False)
            for text in axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False).get_texts():
                text.set_parse_math(False)
        file, undated = io.BytesIO(), {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
        sheet.savefig(file, format=path.suffix[1:], metadata=undated[path.suffix])
    write_output(path, file.getvalue(), "--figure")


def _plain(text: str) -> str:
    """Return a text of the user's for a legend, which drops labels that begin with an underscore."""
    shown = printable(" ".join(text.split()))
    return f" {shown}" if shown.startswith("_") else shown


# --- matplotlib ---


@contextmanager
def drawing(**style: Any) -> Iterator[None]:
    """Draw with the style of the pages inside the block, whatever the user's matplotlibrc says."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # of fonts and caches, which do not matter here
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | style)
        yield


def page_figure(name: str, size: tuple[int, int], draw: Callable[..., Drawn], *what: Any) -> dict[str, Any]:
    """Return a figure of a page: what `Drawn` has, and the drawing as SVG.

    `name` is unique in the page: the ids inside the SVG follow from it. `size` is in SVG units.
    """
    from matplotlib.figure import Figure as Sheet
    from matplotlib.ticker import MaxNLocator

    (width, height), (left, right, bottom, top) = size, MARGINS
    file, undated = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with drawing(**{"svg.hashsalt": name}):
        sheet = Sheet((width / 72, height / 72))
        axes = sheet.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height))
        axes.xaxis.labelpad = 2
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
        drawn = draw(axes, *what)
        if not axes.has_data():
            return {**drawn._asdict(), "svg": ""}
        sheet.savefig(file, format="svg", transparent=True, metadata=undated)
    text = file.getvalue()
    for variable, light in LIGHT.items():
        text = text.replace(light, f"var(--{variable})")
    label = escape(printable(f"{drawn.title}. {drawn.note}"))
    head, rest = f'<svg class="plot" role="img" aria-label="{label}"', text.partition("<svg")[2]
    return {**drawn._asdict(), "svg": head + rest}
