"""The figures of several runs: groups against forwards, single runs over each other, scores over a grid; for papers."""

import io
import textwrap
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mezo_cli.console import printable
from mezo_cli.errors import UserError
from mezo_cli.report.aggregate import Group, format_shots
from mezo_cli.report.details import RunDetails, thin_indices
from mezo_cli.report.figures import (
    MARKERS,
    SHOWN_LINES,
    TABLE_ROWS,
    Figure,
    Line,
    draw_dev,
    draw_lines,
    draw_loss,
    legend_of,
    log_axis,
    make_figure,
    smoothed,
)
from mezo_cli.report.output import make_table, write_output
from mezo_cli.report.read import Entry
from mezo_cli.report.settings import format_value, is_fraction, scale
from mezo_cli.report.svg import SERIES, SIZE, WIDE, colour, drawing

if TYPE_CHECKING:  # matplotlib is imported when a figure is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

FORMATS = (".svg", ".pdf", ".png")  # of a figure for a paper
MOST_LINES, LINE_POINTS = 200, 60  # of single runs in one figure; of each
HEAT = (6, 46)  # percent of colour in the lowest and the highest cell; text stays readable on both
MOST_CELLS = 400  # of a heat map
PAPER_STYLE = {"svg.fonttype": "path", "pdf.fonttype": 42, "font.size": 8, "figure.dpi": 300, "savefig.dpi": 300}
COLUMN, ROW = 3.3, 2.3  # inches: a column of a two-column paper, and the height of a panel
LEGEND = 40  # characters in a line of a legend
SINGLE = "One line per run. The best on dev have colours, the best first."


@dataclass(frozen=True)
class Panel:
    """What is drawn together about several runs.

    Attributes:
        title: what it shows.
        metric: on the vertical axis.
        lines: of groups over forwards, of single runs over steps, or of trials, as points, over a searched number.
        note: what is seen; of groups it follows from the lines.
        x: what the horizontal axis shows.
        is_log: whether that is logarithmic.
    """

    title: str
    metric: str
    lines: Sequence[Line]
    note: str = ""
    x: str = "forwards"
    is_log: bool = False


def panels(groups: Sequence[Group], details: Mapping[str, RunDetails]) -> list[Panel]:
    """Return one panel per task, metric and kind of data; groups that were never evaluated are left out.

    Args:
        groups: the groups of runs.
        details: the details of each run, by its location.
    """
    by_title: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_title[_title(group.entries[0], group.metric)].append(group)
    labelled = {title: {_label(group, members): group for group in members} for title, members in by_title.items()}
    return [panel for title, members in labelled.items() if (panel := panel_of(title, members, details)).lines]


def panel_of(title: str, groups: Mapping[str, Group], details: Mapping[str, RunDetails]) -> Panel:
    """Return the panel of groups, by their labels, that have been evaluated."""
    lines = [Line(label, _curve(group, details), group) for label, group in groups.items()]
    return Panel(title, next(iter(groups.values())).metric, [line for line in lines if not line.curve.empty])


def _title(entry: Entry, metric: str) -> str:
    return f"{entry.config.task.name}{' (demo data)' * (entry.config.data.name == 'demo')}: {metric} on dev"


def _curve(group: Group, details: Mapping[str, RunDetails]) -> pd.DataFrame:
    """Return the curve of the runs that `compare` picks; of all runs as long as none has finished.

    It is over the forwards of a batch; the band is one standard deviation (the population's) of the `runs`.
    """
    picked = [entry for entries in group.picks.entries for entry in entries]
    runs = [details[entry.location] for entry in picked or group.entries if entry.location in details]
    factor = scale(group.metric)
    lines = [
        (line["step"], run.forwards(line["step"]), factor * line[group.metric]) for run in runs for line in run.dev
    ]
    by_step = pd.DataFrame(lines, columns=["step", "forwards", "score"]).astype(float).groupby("step")
    mean, std = by_step["score"].mean(), by_step["score"].std(ddof=0)
    curve = pd.DataFrame({"mean": mean, "std": std, "low": mean - std, "high": mean + std, "runs": by_step.size()})
    return curve.set_index(by_step["forwards"].mean())


def _label(group: Group, members: Sequence[Group]) -> str:
    """Return the group's label, with what else differs between the groups of its panel."""

    def parts(one: Group) -> list[str]:
        return [one.model, one.objective, one.loss, format_shots(one.shots), f"{one.steps:,} steps"]

    all_parts = zip(parts(group), *map(parts, members), strict=True)
    return ", ".join([group.label, *(own for own, *others in all_parts if len(set(others)) > 1)])


def overlays(runs: Sequence[RunDetails], names: Sequence[str]) -> list[Panel]:
    """Return, for each task and metric of several runs, panels of the metric on dev and of the training loss."""
    by_title: dict[str, list[tuple[tuple[float, float], str, RunDetails]]] = defaultdict(list)
    for run, name in zip(runs, names, strict=True):
        if run.best is not None:
            rank = -run.entry.order * run.best[run.metric], run.best["loss"]
            by_title[_title(run.entry, run.metric)].append((rank, name, run))
    drawn = []
    for title, members in ((title, sorted(all_runs, key=lambda run: run[0])) for title, all_runs in by_title.items()):
        kept = sorted({*range(SHOWN_LINES), *thin_indices(len(members), MOST_LINES)} & {*range(len(members))})
        shown = [members[i][1:] for i in kept if len(members) > 1]
        dev = [_single(name, scale(run.metric) * pd.Series(run.dev_scores())) for name, run in shown]
        losses = [
            _single(name, smoothed(pd.Series(run.losses, run.steps))[0]) for name, run in shown if run.losses.size
        ]
        drawn.append(Panel(title, members[0][2].metric, dev, SINGLE, "step"))
        drawn.append(Panel(f"{title.partition(':')[0]}: training loss", "loss", losses, SINGLE, "step"))
    return [panel for panel in drawn if panel.lines]


def _single(name: str, values: "pd.Series[float]") -> Line:
    return Line(name, pd.DataFrame({"mean": values.iloc[thin_indices(len(values), LINE_POINTS)]}))


def panel_figure(panel: Panel, name: str) -> Figure:
    """Return the figure of a panel. `name` is unique in the page."""
    return make_figure(name, partial(_draw, panel), SIZE if panel.x == "step" else WIDE)


def _draw(panel: Panel, axes: "Axes") -> Figure:
    draw_lines(axes, panel.lines, panel.metric, panel.x, points=panel.x not in ("step", "forwards"))
    if panel.is_log:
        log_axis(axes, *axes.get_xlim())
    parts, groups = [panel.note], [line.group for line in panel.lines if line.group is not None]
    if groups:
        several = any(line.curve["std"].any() for line in panel.lines)
        parts = ["Lines: mean over data seeds" + (", with a band of one standard deviation." if several else ".")]
    if any(group.mean is not None for group in groups):
        parts.append("Filled diamonds: test at the best checkpoint.")
    if any(group.paper_number is not None for group in groups):
        parts.append("Hollow diamonds: the paper's test score.")
    shown = panel.lines[:TABLE_ROWS] if panel.x == "step" else panel.lines
    table = make_table("", pd.concat([_rows(line, panel.x) for line in shown]))
    return Figure(panel.title, " ".join(parts), table, legend_of(panel.lines))


def _rows(line: Line, x: str) -> pd.DataFrame:
    """Return the rows of a line in the table of a panel: some of a group, the ends of a single run, all of points."""
    most = {"forwards": TABLE_ROWS // 2, "step": 2}.get(x, len(line.curve))
    shown = line.curve.iloc[thin_indices(len(line.curve), most)].rename_axis(x).reset_index()
    forms = {"forwards": "{:,.0f}", "step": "{:,.0f}", "std": "{:.1f}", "mean": "{:.1f}" if line.group else "{:.4g}"}
    names = [name for name in shown if name not in ("low", "high")]
    what = {"forwards": "group", "step": "run"}.get(x, "trials")
    return pd.DataFrame({what: line.label, **{name: shown[name].map(forms.get(name, "{:g}").format) for name in names}})


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


# --- for a paper ---


def paper_figure(runs: Sequence[RunDetails], panels: Sequence[Panel], path: Path) -> None:
    """Write one figure for a paper, in the colours on white: of one run its loss and dev metric, else the panels.

    It holds no date, so that the same runs give the same file.

    Raises:
        UserError: when there is nothing to draw, or the file cannot be written.
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
        draw_loss(run, axes)
        axes.set_title("training loss", loc="left")
    axes = sheet.add_subplot(1, columns, columns)
    draw_dev(run, axes)
    axes.set_title(f"{run.metric} on dev", loc="left")


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    """Draw a panel, its legend beside it."""
    draw_lines(axes, panel.lines, panel.metric, panel.x)
    axes.set_title(_label_text(panel.title), loc="left", parse_math=False)
    entries, signs = legend_of(panel.lines), dict(zip(SERIES, MARKERS, strict=True))
    handles = [axes.plot([], [], marker=signs.get(name, ""), color=colour(name), ms=4)[0] for name, _ in entries]
    texts = [textwrap.fill(_label_text(text), LEGEND) for _, text in entries]
    legend = axes.legend(handles, texts, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _label_text(text: str) -> str:
    """Return a text of the user's for a legend, which drops labels that begin with an underscore."""
    shown = printable(" ".join(text.split()))
    return f" {shown}" if shown.startswith("_") else shown
