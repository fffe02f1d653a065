"""The figure of groups of runs against forwards, and figures for papers."""

import io
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mezo_cli.console import printable
from mezo_cli.errors import UserError
from mezo_cli.report.aggregate import Group, format_shots
from mezo_cli.report.details import RunDetails, thin_indices
from mezo_cli.report.figures import TABLE_ROWS, Figure, draw_dev, draw_loss, score_axis, step_axis
from mezo_cli.report.output import make_table, write_output
from mezo_cli.report.settings import format_mean, scale
from mezo_cli.report.svg import SERIES, colour, drawing, inline_svg, new_axes, series_name

if TYPE_CHECKING:  # matplotlib is imported when a figure is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

FORMATS = (".svg", ".pdf", ".png")  # of a figure for a paper
MARKERS = ("o", "s", "^", "D", "v", "P")  # of the series; the template shows the same
SHOWN_LINES = len(SERIES)  # lines in colours of their own
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
    parts = ["Lines: mean over the seeds" + (", with a band of one standard deviation." if several else ".")]
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
