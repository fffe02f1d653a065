"""The figures of a page, each with its title, its legend and the table behind it; and figures for a paper."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mezo_cli.errors import UserError
from mezo_cli.report.curves import Line, Panel
from mezo_cli.report.details import RunDetails
from mezo_cli.report.draw import (
    MARKERS,
    SHOWN_LINES,
    count_axis,
    draw_curve,
    draw_evaluations,
    draw_histogram,
    draw_lines,
    draw_shares,
    draw_trials,
    label_text,
    series_name,
)
from mezo_cli.report.render import Table, write_output
from mezo_cli.report.searches import Search, Trial
from mezo_cli.report.series import TABLE_ROWS, Curve, thin_indices
from mezo_cli.report.svg import SERIES, colour, drawing, inline_svg, new_axes

FORMATS = (".svg", ".pdf", ".png")
SHOWN_LABELS = 6  # in the figure of predictions; the rest are counted together
PAPER_STYLE = {"svg.fonttype": "path", "pdf.fonttype": 42, "font.size": 8, "figure.dpi": 300, "savefig.dpi": 300}
COLUMN, ROW = 3.3, 2.3  # inches: a column of a two-column paper, and the height of a panel
LEGEND = 40  # characters in a line of a legend


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
    table: Table
    legend: Sequence[tuple[str, str]] = ()


# --- one run ---


def run_figures(run: RunDetails, name: str) -> list[Figure]:
    """Return the figures of a run, those for which it has numbers. `name` is unique in the page."""
    with drawing():
        made = [
            make(run, f"{name}{number}")
            for number, make in enumerate((_loss, _dev, _dev_loss, _predictions, _gradients, _speed))
        ]
    return [figure for figure in made if figure is not None]


def _loss(run: RunDetails, name: str) -> Figure | None:
    curve = run.loss
    if curve is None:
        return None
    axes = new_axes()
    draw_curve(axes, curve, "c1")
    note = f"Thin: as logged. Thick: the mean of {curve.window} neighbouring values." if curve.window > 1 else ""
    rows = [
        [f"{curve.steps[i]:,}", f"{curve.values[i]:.4f}", f"{curve.smooth[i]:.4f}"]
        for i in thin_indices(len(curve.steps), TABLE_ROWS)
    ]
    label = f"Training loss over steps, from {curve.smooth[0]:.4f} to {curve.smooth[-1]:.4f}"
    table = Table("", ("step", "loss", "smoothed"), rows, left=0)
    return Figure("Training loss", note, inline_svg(axes, name, label), table)


def _dev(run: RunDetails, name: str) -> Figure | None:
    dev = run.dev
    if dev is None:
        return None
    axes = new_axes()
    draw_evaluations(axes, dev, "c3")
    rows = [
        [f"{dev.steps[i]:,}", f"{100 * dev.scores[i]:.1f}{' (best)' if i == dev.best else ''}", f"{dev.losses[i]:.4f}"]
        for i in sorted({*thin_indices(len(dev.steps), TABLE_ROWS), dev.best})
    ]
    title = f"{run.metric.capitalize()} on dev"
    note = f"Dashed: {100 * dev.scores[0]:.1f}% before the first step. Best: {dev.best_text()}."
    table = Table("", ("step", f"{run.metric} %", "loss"), rows, left=0)
    return Figure(title, note, inline_svg(axes, name, f"{title} over steps. {note}"), table)


def _dev_loss(run: RunDetails, name: str) -> Figure | None:
    dev = run.dev
    if dev is None:
        return None
    axes, steps, losses = new_axes(), np.array(dev.steps), np.array(dev.losses)
    draw_curve(axes, Curve(steps, losses, losses, 1), "c2")
    lowest = int(losses.argmin())
    note = f"{losses[0]:.4f} before the first step; lowest {losses[lowest]:.4f} at step {steps[lowest]:,}."
    rows = [[f"{steps[i]:,}", f"{losses[i]:.4f}"] for i in thin_indices(len(steps), TABLE_ROWS)]
    svg = inline_svg(axes, name, f"Loss on dev over steps. {note}")
    return Figure("Loss on dev", note, svg, Table("", ("step", "loss"), rows, left=0))


def _predictions(run: RunDetails, name: str) -> Figure | None:
    dev = run.dev
    if dev is None:
        return None
    shares = shown_shares(dev.shares)
    axes = new_axes()
    draw_shares(axes, dev.steps, shares)
    rows = [
        [f"{dev.steps[i]:,}", *(f"{100 * values[i]:.1f}" for values in shares.values())]
        for i in thin_indices(len(dev.steps), TABLE_ROWS)
    ]
    if run.one_label is not None:
        label, share = run.one_label
        note = f"The last evaluation predicts {label} for {100 * share:.0f}% of the rows."
    else:
        note = "The share of the dev rows that get each label. One band that fills the height is a collapse."
    legend = [(series_name(number), label) for number, label in enumerate(shares)]
    table = Table("", ("step", *(f"{label} %" for label in shares)), rows, left=0)
    svg = inline_svg(axes, name, "Share of the dev rows predicted as each label, over steps")
    return Figure("Predictions per label", note, svg, table, legend)


def shown_shares(shares: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return label -> share at each evaluation, of the most predicted labels and of the others together."""
    labels = list(shares[0])
    if len(labels) > SHOWN_LABELS:
        labels = sorted(labels, key=lambda label: -sum(one.get(label, 0.0) for one in shares))[: SHOWN_LABELS - 1]
    found = {label: [one.get(label, 0.0) for one in shares] for label in labels}
    rest = len(shares[0]) - len(labels)
    if rest:
        found[f"{rest} other labels"] = [1 - sum(one.get(label, 0.0) for label in labels) for one in shares]
    return found


def _gradients(run: RunDetails, name: str) -> Figure | None:
    found, stats = run.gradients, run.gradient_stats
    if found is None:
        return None
    zeros = f"{found.zeros:,} of {found.total:,} are exactly 0 ({100 * found.zeros / found.total:.1f}%)"
    if not found.counts.size:
        svg = ""
        rows = []
    else:
        axes = new_axes()
        draw_histogram(axes, found, "c4")
        svg = inline_svg(axes, name, f"Histogram of the sizes of the projected gradients. {zeros}")
        pairs = zip(found.edges[:-1], found.edges[1:], found.counts, strict=True)
        rows = [[f"{low:.3g} to {high:.3g}", f"{count:,}"] for low, high, count in pairs]
    mean = f"mean {stats['mean_abs']:.3g}, from {stats['min_abs']:.3g} to {stats['max_abs']:.3g}"
    table = Table("", ("|g|", "samples"), [["0", f"{found.zeros:,}"], *rows], left=1)
    return Figure("Size of the projected gradient |g|", f"{zeros}; {mean}.", svg, table)


def _speed(run: RunDetails, name: str) -> Figure | None:
    curve = run.speed
    if curve is None:
        return None
    axes = new_axes()
    draw_curve(axes, curve, "c5")
    count_axis(axes)
    middle = sorted(curve.values)[len(curve.values) // 2]
    rows = [
        [f"{curve.steps[i]:,}", f"{curve.values[i]:.3g}", f"{curve.smooth[i]:.3g}"]
        for i in thin_indices(len(curve.steps), TABLE_ROWS)
    ]
    note = f"Median {middle:.3g} steps per second, evaluations between logged steps included."
    table = Table("", ("step", "steps/s", "smoothed"), rows, left=0)
    return Figure("Speed", note, inline_svg(axes, name, f"Steps per second over steps. {note}"), table)


# --- groups of runs ---


def panel_figure(panel: Panel, name: str) -> Figure:
    """Return the figure of a panel."""
    with drawing():
        axes = new_axes((440, 280))
        draw_lines(axes, panel.lines)
        svg = inline_svg(axes, name, f"{panel_title(panel)} against forwards, one line per group")
    rows = [_line_row(line, i) for line in panel.lines for i in thin_indices(len(line.forwards), TABLE_ROWS // 2)]
    several = any((line.std > 0).any() for line in panel.lines)
    parts = ["Lines: mean over data seeds" + (", with a band of one standard deviation." if several else ".")]
    if any(line.test is not None for line in panel.lines):
        parts.append("Filled diamonds: test at the best checkpoint.")
    if any(line.number is not None for line in panel.lines):
        parts.append("Hollow diamonds: the paper's test score.")
    table = Table("", ("group", "forwards", "mean %", "std", "runs"), rows, left=1)
    return Figure(panel_title(panel), " ".join(parts), svg, table, panel_legend(panel.lines))


def _line_row(line: Line, at: int) -> list[str]:
    scores = [f"{100 * value:.1f}" for value in (line.mean[at], line.std[at])]
    return [line.label, f"{line.forwards[at]:,.0f}", *scores, str(line.runs[at])]


def panel_title(panel: Panel) -> str:
    """Return what a panel shows."""
    return f"{panel.task}{' (demo data)' if panel.demo else ''}: {panel.metric} on dev"


def panel_legend(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return (colour name, text) of each line; those that have no colour of their own are counted."""
    legend = []
    for number, line in enumerate(lines[:SHOWN_LINES]):
        test = "" if line.test is None else f": test {100 * line.test:.1f}"
        spread = "" if line.test_std is None else f" ({100 * line.test_std:.1f})"
        paper = "" if line.number is None else f", paper {line.number}"
        legend.append((series_name(number), f"{line.label}{test}{spread}{paper}"))
    rest = len(lines) - SHOWN_LINES
    return legend + ([("quiet", f"{rest} more, in the table")] if rest > 0 else [])


# --- searches ---


def search_figures(search: Search, name: str) -> list[Figure]:
    """Return one figure per searched number: the score of every trial against it. `name` is unique in the page."""
    what = "lowest loss" if search.goal == "loss" else search.goal
    note = (
        f"The {what} on dev after step 0. Filled: the best trial so far; ringed: the best. Hollow: another that "
        "finished. Small and grey: pruned, or not finished. Cross: diverged."
    )
    found = []
    for number, searched in enumerate(search.ranges):
        rows = [
            [str(trial.number), f"{trial.values[searched.key]:.3g}", _trial_score(trial, search.goal), trial.end]
            for trial in search.trials
        ]
        title = f"{search.name}: {search.goal} against {searched.key}"
        with drawing():
            axes = new_axes((440, 280))
            draw_trials(axes, search, searched)
            svg = inline_svg(axes, f"{name}{number}", f"{title}, one mark per trial")
        unit = "" if search.goal == "loss" else " %"
        table = Table("", ("trial", searched.key, f"{search.goal}{unit}", "ended"), rows, left=0)
        found.append(Figure(title, note, svg, table))
    return found


def _trial_score(trial: Trial, goal: str) -> str:
    if trial.score is None:
        return "-"
    return f"{trial.score if goal == 'loss' else 100 * trial.score:.3g}{' (best so far)' if trial.is_record else ''}"


# --- for a paper ---


def paper_figure(runs: Sequence[RunDetails], panels: Sequence[Panel], path: Path) -> None:
    """Write one figure for a paper, in the colours on white: of one run its loss and dev metric, else the panels.

    Raises:
        UserError: when there is nothing to draw, or the file cannot be written.
    """
    if not panels:
        raise UserError("--figure: no run here has been evaluated yet, so there is nothing to draw")
    from matplotlib.figure import Figure as Sheet

    with drawing(**PAPER_STYLE):
        rows = 1 if len(runs) == 1 else len(panels)
        sheet = Sheet((2 * COLUMN, rows * ROW), layout="constrained")
        if len(runs) == 1:
            _draw_run(sheet, runs[0])
        else:
            _draw_panels(sheet, panels)
        _save(sheet, path)


def _draw_run(sheet: Any, run: RunDetails) -> None:
    """Draw the loss, if a step was logged, and beside it the metric on dev."""
    columns = 1 if run.loss is None else 2
    if run.loss is not None:
        axes = sheet.add_subplot(1, columns, 1)
        draw_curve(axes, run.loss, "c1")
        axes.set_title("training loss", loc="left")
    if run.dev is not None:
        axes = sheet.add_subplot(1, columns, columns)
        draw_evaluations(axes, run.dev, "c3")
        axes.set_title(f"{run.metric} on dev", loc="left")


def _draw_panels(sheet: Any, panels: Sequence[Panel]) -> None:
    """Draw one panel per row, its legend beside it."""
    for number, panel in enumerate(panels):
        axes = sheet.add_subplot(len(panels), 1, number + 1)
        draw_lines(axes, panel.lines)
        axes.set_title(label_text(panel_title(panel)), loc="left", parse_math=False)
        entries = panel_legend(panel.lines)
        signs = dict(zip(SERIES, MARKERS, strict=True))
        handles = [axes.plot([], [], signs.get(name, ""), ls="-", color=colour(name), ms=4)[0] for name, _ in entries]
        texts = [textwrap.fill(label_text(text), LEGEND) for _, text in entries]
        legend = axes.legend(handles, texts, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _save(sheet: Any, path: Path) -> None:
    """Write a figure, completely or not at all. It holds no date, so that the same runs give the same file."""
    nothing = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix]
    file = io.BytesIO()
    sheet.savefig(file, format=path.suffix[1:], metadata=nothing)
    write_output(path, file.getvalue(), "--figure")
