"""The figures of several runs: groups against forwards, scores over a grid, trials of searches; and for papers."""

import io
import textwrap
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mezo_cli.config.search_ranges import Range
from mezo_cli.console import printable
from mezo_cli.errors import UserError
from mezo_cli.report.aggregate import Group, format_shots
from mezo_cli.report.details import RunDetails, thin_indices
from mezo_cli.report.figures import TABLE_ROWS, Figure, draw_dev, draw_loss, log_axis, score_axis, step_axis
from mezo_cli.report.output import make_table, write_output
from mezo_cli.report.searches import Search
from mezo_cli.report.settings import format_mean, format_value, is_fraction, scale
from mezo_cli.report.svg import SERIES, colour, drawing, inline_svg, new_axes, series_name

if TYPE_CHECKING:  # matplotlib is imported when a figure is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

FORMATS = (".svg", ".pdf", ".png")  # of a figure for a paper
MARKERS = ("o", "s", "^", "D", "v", "P")  # of the series; the template shows the same
SHOWN_LINES = len(SERIES)  # lines in colours of their own
HEAT = (6, 46)  # percent of colour in the lowest and the highest cell; text stays readable on both
MOST_CELLS = 400  # of a heat map
WIDE = (440, 280)
PAPER_STYLE = {"svg.fonttype": "path", "pdf.fonttype": 42, "font.size": 8, "figure.dpi": 300, "savefig.dpi": 300}
COLUMN, ROW = 3.3, 2.3  # inches: a column of a two-column paper, and the height of a panel
LEGEND = 40  # characters in a line of a legend


@dataclass(frozen=True)
class Line:
    """The metric on dev of a group, over its data seeds.

    Attributes:
        label: what distinguishes the group from the others of its panel.
        group: the group; its test score and the paper's number stand beside the curve.
        curve: a row per step at which runs were evaluated: forwards (of a batch), mean and std (the population's) of
            the metric as it is shown, runs (how many were evaluated there).
    """

    label: str
    group: Group
    curve: pd.DataFrame


@dataclass(frozen=True)
class Panel:
    """The lines of the groups on one task, which are drawn together."""

    title: str
    lines: Sequence[Line]


# --- curves of groups ---


def panels(groups: Sequence[Group], details: Mapping[str, RunDetails]) -> list[Panel]:
    """Return one panel per task, metric and kind of data; groups that were never evaluated are left out.

    Args:
        groups: the groups of runs.
        details: the details of each run, by its location.
    """
    by_title: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_title[f"{group.task}{' (demo data)' if group.demo else ''}: {group.metric} on dev"].append(group)
    drawn = []
    for title, members in by_title.items():
        curves = ((group, _curve(group, details)) for group in members)
        lines = [Line(_label(group, members), group, curve) for group, curve in curves if not curve.empty]
        drawn += [Panel(title, lines)] if lines else []
    return drawn


def panel_of(title: str, groups: Mapping[str, Group], details: Mapping[str, RunDetails]) -> Panel:
    """Return the panel of groups by their labels, all of which have been evaluated."""
    return Panel(title, [Line(label, group, _curve(group, details)) for label, group in groups.items()])


def _curve(group: Group, details: Mapping[str, RunDetails]) -> pd.DataFrame:
    """Return the curve of the runs that `compare` picks; of all runs as long as none has finished."""
    picked = [entry for entries in group.picks.entries for entry in entries]
    runs = [details[entry.location] for entry in picked or group.entries if entry.location in details]
    factor = scale(group.metric)
    lines = [
        (line["step"], run.forwards(line["step"]), factor * line[group.metric]) for run in runs for line in run.dev
    ]
    by_step = pd.DataFrame(lines, columns=["step", "forwards", "score"]).astype(float).groupby("step")
    scores = by_step["score"]
    columns = {"forwards": by_step["forwards"].mean(), "mean": scores.mean(), "std": scores.std(ddof=0)}
    return pd.DataFrame({**columns, "runs": scores.size()})


def _label(group: Group, members: Sequence[Group]) -> str:
    """Return the group's label, with what else differs between the groups of its panel."""

    def parts(one: Group) -> list[str]:
        return [one.model, one.objective, one.loss, format_shots(one.shots), f"{one.steps:,} steps"]

    all_parts = zip(parts(group), *map(parts, members), strict=True)
    return ", ".join([group.label, *(own for own, *others in all_parts if len(set(others)) > 1)])


def panel_figure(panel: Panel, name: str) -> Figure:
    """Return the figure of a panel."""
    with drawing():
        axes = new_axes(WIDE)
        draw_lines(axes, panel.lines)
        svg = inline_svg(axes, name, f"{panel.title} against forwards, one line per group")
    table = make_table("", pd.concat(map(_line_table, panel.lines)))
    several = any((line.curve["std"] > 0).any() for line in panel.lines)
    parts = ["Lines: mean over data seeds" + (", with a band of one standard deviation." if several else ".")]
    if any(line.group.mean is not None for line in panel.lines):
        parts.append("Filled diamonds: test at the best checkpoint.")
    if any(line.group.paper_number is not None for line in panel.lines):
        parts.append("Hollow diamonds: the paper's test score.")
    return Figure(panel.title, " ".join(parts), svg, table, panel_legend(panel.lines))


def _line_table(line: Line) -> pd.DataFrame:
    shown = line.curve.iloc[thin_indices(len(line.curve), TABLE_ROWS // 2)]
    texts = {"forwards": shown["forwards"].map("{:,.0f}".format), "mean": shown["mean"].map("{:.1f}".format)}
    texts |= {"std": shown["std"].map("{:.1f}".format), "runs": shown["runs"].astype(str)}
    return pd.DataFrame({"group": line.label, **texts})


def panel_legend(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return (colour name, text) of each line; those that have no colour of their own are counted."""
    legend = []
    for number, line in enumerate(lines[:SHOWN_LINES]):
        mean, std, paper = line.group.mean, line.group.std, line.group.paper_number
        test = "" if mean is None else f": test {format_mean(line.group.metric, mean, std)}"
        legend.append((series_name(number), f"{line.label}{test}{'' if paper is None else f', paper {paper}'}"))
    rest = len(lines) - SHOWN_LINES
    return legend + ([("quiet", f"{rest} more, in the table")] if rest > 0 else [])


def draw_lines(axes: "Axes", lines: Sequence[Line]) -> None:
    """Draw groups: the mean of the metric on dev against forwards, a band of one std, and marks for the test scores.

    To the right of the curves stand our test score (filled, with its std) and the paper's (hollow).
    """
    furthest = max(line.curve["forwards"].max() for line in lines) or 1
    for number, line in reversed(list(enumerate(lines))):
        name, curve = series_name(number) if number < SHOWN_LINES else "quiet", line.curve
        low, high = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
        if curve["std"].any():
            axes.fill_between(curve["forwards"], low, high, color=colour(name), alpha=0.16, linewidth=0)
        dots: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4} if len(curve) <= 25 else {}
        width = 0.8 if name == "quiet" else 1.8
        axes.plot(curve["forwards"], curve["mean"], color=colour(name), linewidth=width, **dots)
    x = 1.06 * furthest
    for number, line in enumerate(lines[:SHOWN_LINES]):
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


# --- grids ---


def heat_map(group: Group, trials: Collection[str] = ()) -> dict[str, Any] | None:
    """Return the best dev score at each point of a group's grid, mean over data seeds; None for one point or too many.

    The two settings that vary most are the columns and rows; further settings are at their best.

    Args:
        group: the group of runs.
        trials: the locations of runs that are left out: trials of a search lie at no grid.
    """
    runs = group.runs[group.runs.finished & ~group.runs.entry.map(lambda entry: entry.location in trials)]
    points = pd.DataFrame([dict(group.grid[number]) for number in runs.point], runs.index)
    count = points.nunique().sort_values(ascending=False, kind="stable")
    varying = list(count[count > 1].index)
    if not varying:
        return None
    across = "optimizer.lr" if "optimizer.lr" in varying else varying[0]
    down = next(key for key in [*varying, *points] if key != across)
    scores = runs[["dev", "data_seed"]].join(points).groupby([*points, "data_seed"], dropna=False)["dev"].mean()
    means = scores.groupby(list(points), dropna=False).agg(["mean", "size"]).reset_index()
    best = means.sort_values("mean").drop_duplicates([down, across], keep="last")
    cells = best.pivot(index=down, columns=across, values=["mean", "size"])
    corner = f"{down.split('.')[-1]} \\ {across.split('.')[-1]}"
    if cells["mean"].size > MOST_CELLS:
        return None  # the table of all runs, which can be sorted, says more
    form = ".1f" if is_fraction(group.metric) else ".4g"
    return heat_table(group.title, corner, scale(group.metric) * cells["mean"], form, cells["size"])


def heat_table(
    title: str, corner: str, values: pd.DataFrame, form: str, small: pd.DataFrame | None = None
) -> dict[str, Any]:
    """Return what the template shows of a table of coloured numbers.

    Args:
        title: of the table.
        corner: says what the rows and the columns are.
        values: the numbers, nan where there is none.
        form: how they are written.
        small: counts below the numbers, whose best one is outlined then.
    """
    low, high = values.min().min(), values.max().max()
    spread = high - low if high > low else 1.0
    heats = (HEAT[1] - (HEAT[1] - HEAT[0]) * (high - values) / spread).round()
    texts = values.map(lambda value: "" if pd.isna(value) else f"{value:{form}}")
    cells = {"texts": texts.to_numpy(), "heats": heats.to_numpy(), "small": None if small is None else small.to_numpy()}
    names = {"columns": list(map(format_value, values)), "rows": list(map(format_value, values.index))}
    best = "" if small is None else f"{high:{form}}"
    return {"title": title, "corner": corner, **names, **cells, "best": best}


# --- searches ---


def search_figures(search: Search, name: str) -> list[Figure]:
    """Return one figure per searched number: the score of every trial against it. `name` is unique in the page."""
    is_loss, trials = search.goal == "loss", search.trials
    what = "lowest loss" if is_loss else search.goal
    note = (
        f"The {what} on dev after step 0. Filled: the best trial so far; ringed: the best. Hollow: another that "
        "finished. Small and grey: pruned, or not finished. Cross: diverged."
    )
    column, figures = f"{search.goal}{' %' * is_fraction(search.goal)}", []
    for number, searched in enumerate(search.ranges):
        best = trials["is_record"].map({True: ", the best so far", False: ""})
        scores = (trials["score"] * scale(search.goal)).map("{:.3g}".format).replace("nan", "-")
        texts = {"trial": trials["number"].astype(str), searched.key: trials[searched.key].map("{:.3g}".format)}
        table = make_table("", pd.DataFrame({**texts, column: scores, "ended": trials["end"] + best}), left=0)
        title = f"{search.name}: {search.goal} against {searched.key}"
        with drawing():
            axes = new_axes(WIDE)
            draw_trials(axes, search, searched)
            svg = inline_svg(axes, f"{name}{number}", f"{title}, one mark per trial")
        figures.append(Figure(title, note, svg, table))
    return figures


def draw_trials(axes: "Axes", search: Search, searched: Range) -> None:
    """Draw the score of each trial of a search against one of the searched numbers.

    Each trial that was the best so far is filled, the best of all ringed; pruned ones are grey; diverged ones are
    crosses at the lower edge, where the axis of a loss is reversed: better is higher.
    """
    is_loss, trials = search.goal == "loss", search.trials
    x, y = trials[searched.key], trials["score"] * scale(search.goal)
    diverged, finished = trials["end"] == "diverged", trials["end"] == "finished"
    axes.plot(x[diverged], [0.03] * diverged.sum(), "x", color=colour("c2"), ms=6, transform=axes.get_xaxis_transform())
    ways: list[tuple[Any, dict[str, Any]]] = [
        (~diverged & ~finished, {"ms": 4, "mec": colour("quiet"), "mfc": colour("page")}),
        (finished & ~trials["is_record"], {"ms": 6, "mec": colour("c1"), "mfc": colour("page")}),
        (trials["is_record"], {"ms": 6, "mec": colour("c1"), "mfc": colour("c1")}),
        (trials.index == trials.index[trials["is_record"]].max(), {"ms": 13, "mec": colour("c1"), "mfc": "none"}),
    ]
    for chosen, style in ways:
        axes.plot(x[chosen], y[chosen], "o", mew=1.5, **style)
    low, high = searched.low, searched.high
    if searched.is_log:
        log_axis(axes, low, high)
    around = (high / low) ** 0.04 if searched.is_log else 0.04 * (high - low)  # so that no mark is cut
    axes.set_xlim(*((low / around, high * around) if searched.is_log else (low - around, high + around)))
    axes.margins(y=0.16)
    axes.set_xlabel(searched.key, loc="right", parse_math=False)
    if is_loss:
        axes.invert_yaxis()
    score_axis(axes, search.goal)


# --- for a paper ---


def paper_figure(runs: Sequence[RunDetails], panels: Sequence[Panel], path: Path) -> None:
    """Write one figure for a paper, in the colours on white: of one run its loss and dev metric, else the panels.

    It holds no date, so that the same runs give the same file.
    """
    if not panels:
        raise UserError("--figure: no run here has been evaluated yet, so there is nothing to draw")
    from matplotlib.figure import Figure as Sheet

    with drawing(**PAPER_STYLE, **{"svg.hashsalt": "mezo"}):
        sheet = Sheet((2 * COLUMN, (1 if len(runs) == 1 else len(panels)) * ROW), layout="constrained")
        if len(runs) == 1:
            _draw_run(sheet, runs[0])
        else:
            for number, panel in enumerate(panels):
                _draw_panel(sheet.add_subplot(len(panels), 1, number + 1), panel)
        file, undated = io.BytesIO(), {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
        sheet.savefig(file, format=path.suffix[1:], metadata=undated[path.suffix])
    write_output(path, file.getvalue(), "--figure")


def _draw_run(sheet: "Sheet", run: RunDetails) -> None:
    """Draw the loss, if a step was logged, and beside it the metric on dev."""
    columns = 2 if len(run.losses) else 1
    if len(run.losses):
        axes = sheet.add_subplot(1, columns, 1)
        draw_loss(axes, run)
        axes.set_title("training loss", loc="left")
    axes = sheet.add_subplot(1, columns, columns)
    draw_dev(axes, run)
    axes.set_title(f"{run.metric} on dev", loc="left")


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    """Draw a panel, its legend beside it."""
    draw_lines(axes, panel.lines)
    axes.set_title(_label_text(panel.title), loc="left", parse_math=False)
    entries, signs = panel_legend(panel.lines), dict(zip(SERIES, MARKERS, strict=True))
    handles = [axes.plot([], [], signs.get(name, ""), ls="-", color=colour(name), ms=4)[0] for name, _ in entries]
    texts = [textwrap.fill(_label_text(text), LEGEND) for _, text in entries]
    legend = axes.legend(handles, texts, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _label_text(text: str) -> str:
    """Return a text of the user's for a legend, which drops labels that begin with an underscore."""
    shown = printable(" ".join(text.split()))
    return f" {shown}" if shown.startswith("_") else shown
