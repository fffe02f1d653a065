"""The curves of single runs over each other, and a table of all runs."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mezo_cli.report.details import RunDetails, thin_indices
from mezo_cli.report.differences import differing_keys, name_runs, short_name, telling_keys, with_all_keys
from mezo_cli.report.figures import TABLE_ROWS, Figure, score_axis, smoothed, step_axis
from mezo_cli.report.output import make_table
from mezo_cli.report.settings import format_mean, format_value, scale
from mezo_cli.report.svg import SERIES, colour, drawing, inline_svg, new_axes, series_name

MOST_CURVES = 200  # drawn in one figure
CURVE_POINTS = 60  # of each


def run_names(runs: Sequence[RunDetails]) -> list[str]:
    """Return each run in what it differs in from the others, with its directory where that is not enough."""
    names = name_runs([run.entry.settings for run in runs])
    counts = Counter(names)
    pairs = zip(names, runs, strict=True)
    return [name if counts[name] == 1 else ", ".join(filter(None, (name, run.name))) for name, run in pairs]


# --- the figures ---


def overlays(runs: Sequence[RunDetails], names: Sequence[str]) -> list[Figure]:
    """Return, for each task and metric of several runs, the figures of the metric on dev and of the training loss."""
    by_title: dict[str, list[tuple[str, RunDetails]]] = defaultdict(list)
    for run, name in zip(runs, names, strict=True):
        if run.best is not None:
            demo = " (demo data)" if run.config.data.name == "demo" else ""
            by_title[f"{run.config.task.name}{demo}: {run.metric} on dev"].append((name, run))
    figures: list[Figure] = []
    for title, members in by_title.items():
        if len(members) > 1:
            ordered = sorted(members, key=lambda member: _rank(member[1]))
            dev = {name: scale(run.metric) * pd.Series(run.dev_scores()) for name, run in ordered}
            losses = {name: smoothed(pd.Series(run.losses, run.steps))[0] for name, run in ordered}
            task, metric = title.partition(":")[0], ordered[0][1].metric
            with drawing():
                figures.append(_overlay(title, dev, metric, f"o{len(figures)}"))
                figures.append(_overlay(f"{task}: training loss", losses, "loss", f"o{len(figures)}"))
    return figures


def _rank(run: RunDetails) -> tuple[float, float]:
    """Return the sort key of a run among others: by its best score, then by the loss there."""
    assert run.best is not None
    return run.config.rank(run.best)


def _overlay(title: str, curves: "Mapping[str, pd.Series[float]]", metric: str, name: str) -> Figure:
    """Draw curves, the best run's first: the first few in colours of their own, over the others."""
    axes, own, names, series = new_axes(), len(SERIES), list(curves), list(curves.values())
    rest = len(curves) - own
    others = own + thin_indices(rest, MOST_CURVES) if rest > 0 else ()
    for number in [*others, *reversed(range(min(own, len(curves))))]:
        values = series[number]
        shade, width = (series_name(number), 1.8) if number < own else ("quiet", 0.6)
        marker = "o" if len(values) == 1 else None
        shown = values.iloc[thin_indices(len(values), CURVE_POINTS)]
        axes.plot(shown, color=colour(shade), linewidth=width, marker=marker, markersize=4)
    step_axis(axes, int(max((values.index[-1] for values in series if len(values)), default=0)))
    score_axis(axes, metric)
    legend = [(series_name(number), name) for number, name in enumerate(names[:own])]
    if rest > 0:
        legend.append(("quiet", f"{rest:,} more{f', {MOST_CURVES} of them drawn' if rest > MOST_CURVES else ''}"))
    rows = [
        {"run": name, "first": f"{curves[name].iloc[0]:.4g}", "last": f"{curves[name].iloc[-1]:.4g}"}
        for name in names[:TABLE_ROWS]
        if len(curves[name])
    ]
    svg = inline_svg(axes, name, f"{title}, one line per run")
    note = "One line per run. The best on dev have colours, the best first."
    return Figure(title, note, svg, make_table("", rows), legend)


# --- the table ---


def run_table(runs: Sequence[RunDetails], links: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns and rows of the table of all runs, with every setting that differs.

    Args:
        runs: the runs.
        links: the location of a run -> the id of its section in the page.
    """
    settings = with_all_keys([run.entry.settings for run in runs])
    keys = telling_keys(settings, differing_keys(settings))
    rows = [
        {
            "run": run.name,
            "status": run.entry.status,
            **{short_name(key): format_value(own[key]) for key in keys},
            "step": f"{run.entry.steps_done:,}",
            "dev": format_mean(
                run.metric, None if run.best is None else run.best[run.metric], marked=run.entry.picked_start
            ),
            "at step": "-" if run.best is None else f"{run.best['step']:,}",
            "dev loss": "-" if run.best is None else f"{run.best['loss']:.4f}",
            "test": format_mean(run.metric, run.entry.score("test"), marked=run.entry.picked_start),
            "seconds": f"{run.total_seconds:,.0f}",
        }
        for run, own in zip(runs, settings, strict=True)
    ]
    return {
        "columns": list(rows[0]),
        "words": 2,
        "rows": [(links.get(row["run"]), row) for row in rows],
    }
