"""Write one self-contained HTML page about some runs: no request leaves it, and it runs no script.

Everything that comes from files (names, texts, labels, errors) is escaped by the template engine, and characters that
would hide or reorder text are shown as escapes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.console import format_duration, printable
from mezo_cli.report.aggregate import Group
from mezo_cli.report.curves import HeatMap, Panel, heat_maps
from mezo_cli.report.details import Prediction, RunDetails
from mezo_cli.report.draw import series_name
from mezo_cli.report.figures import panel_figure, run_figures, search_figures
from mezo_cli.report.paper import paper
from mezo_cli.report.render import Comparison, Table
from mezo_cli.report.searches import Search
from mezo_cli.report.settings import format_value
from mezo_cli.report.svg import COLOURS, SERIES
from mezo_cli.report.views import PROTOCOL, group_view
from mezo_cli.runs.picked import MARK, NOTE
from mezo_cli.runs.run_json import utc_now
from mezo_cli.system import package_version

if TYPE_CHECKING:  # jinja2 is imported when a page is written
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
LONGEST = 400  # characters of a test row's text or a prompt that are shown
MANY, LONGEST_OF_MANY = 10, 160  # runs in a page from which on fewer characters are shown
MOST_OTHERS = 3  # labels that were neither given nor predicted, of a test row
HEAT = (6, 46)  # percent of colour in the lowest and the highest cell; text stays readable on both


def render(
    runs: Sequence[RunDetails],
    groups: Sequence[Group],
    panels: Sequence[Panel],
    searches: Sequence[Search],
    warnings: Sequence[str],
    progress: Callable[[int], None],
) -> str:
    """Return the page.

    Args:
        runs: the runs; if it is one, the page is about that run alone.
        groups: the groups that they form.
        panels: the curves of the groups.
        searches: the searches that runs are trials of, which have no heat map.
        warnings: one line per directory that is left out.
        progress: called with the number of runs that are drawn.
    """
    longest = LONGEST if len(runs) < MANY else LONGEST_OF_MANY
    single = _run(runs[0], "r0", longest) if len(runs) == 1 else None
    numbered = []
    for number, run in enumerate([] if single else runs):
        numbered.append(_run(run, f"r{number}", longest))
        progress(number + 1)
    trials = {path for search in searches for path in search.locations}
    compared = group_view(groups, seeds=False) if groups else Comparison([])
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=runs[0].title if single else f"{len(runs)} runs",
            lede=_lede(runs),
            written=utc_now()[:10],
            style=_style(),
            single=single and {**single, "body": _body(single, "h2")},
            warnings=warnings,
            groups=compared,
            protocol=f"{PROTOCOL[0].upper()}{PROTOCOL[1:]}",
            panels=[] if single else [panel_figure(panel, f"p{number}") for number, panel in enumerate(panels)],
            searches=[] if single else [search_figures(one, f"s{number}_") for number, one in enumerate(searches)],
            heat_maps=[] if single else [_heat_map(found) for found in heat_maps(groups, trials)],
            runs=[{**run, "body": _body(run, "h3")} for run in numbered],
            paper=paper().source if any(group.paper_number for group in groups) else "",
            version=package_version(),
        )
    )


def _body(run: Mapping[str, Any], heading: str) -> Any:
    below = f"h{int(heading[1]) + 1}"
    return _environment().get_template("parts.html").module.run_body(run, heading, below)  # type: ignore[attr-defined]


@cache
def _environment() -> "Environment":
    import jinja2

    def shown(value: Any) -> Any:
        return printable(value) if type(value) is str else value

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name != "style.css",
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _style() -> Any:
    """Return the style sheet, with the colours of both schemes."""
    from markupsafe import Markup

    def variables(scheme: int) -> str:
        return "; ".join(f"--{name}: {values[scheme]}" for name, values in COLOURS.items())

    colours = f":root {{ {variables(0)}; color-scheme: light dark; }}\n"
    colours += f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(1)} }} }}"
    return Markup(_environment().get_template("style.css").render(colours=colours, series=[*SERIES, "quiet"]))


# --- one run ---


def _run(run: RunDetails, name: str, longest: int) -> dict[str, Any]:
    """Return what the template shows of a run. `name` is unique in the page; texts are cut at `longest` characters."""
    entry, examples = run.entry, run.examples
    colours = {label: series_name(number) for number, label in enumerate(run.config.task.labels)}
    return {
        "title": run.title,
        "summary": f"{run.name}: {summary_line(run)}",
        "sentence": run.sentence(),
        "name": run.name,
        "status": entry.status if entry.finished else entry.trouble(),
        "warnings": run_warnings(run),
        "key": _key_numbers(run),
        "baseline": run.baseline_sentence(),
        "prompt": None if run.prompt is None else _short(run.prompt, longest),
        "template": run.config.task.template,
        "words": run.label_words(),
        "figures": run_figures(run, name),
        "examples": {
            "message": examples.message,
            "right": [_example(one, colours, longest) for one in examples.right],
            "wrong": [_example(one, colours, longest) for one in examples.wrong],
            "right_count": examples.right_count,
            "wrong_count": examples.wrong_count,
        },
        "confusion": _confusion(run),
        "label_legend": [(colours[label], label) for label in colours],
        "commands": run.commands(),
        "settings": Table("", ("setting", "value", "default"), [one.texts() for one in run.settings()], left=3),
        "facts": run.facts(),
        "versions": run.versions(),
    }


def summary_line(run: RunDetails) -> str:
    """Return status and result of a run in one line."""
    if not run.entry.finished:
        return run.entry.trouble()
    dev, test = run.dev, run.entry.test
    mark = f" {MARK}" if run.entry.picked_start else ""
    parts = [f"dev {100 * dev.scores[dev.best]:.1f}{mark}"] if dev else []
    parts += [f"test {100 * test.score:.1f}{mark}"] if test else []
    parts += [f"lr {run.config.optimizer.lr:g}"] if run.config.steps else []
    return ", ".join([*parts, f"seed {run.config.seed}"])


def run_warnings(run: RunDetails) -> list[str]:
    """Return what a reader must know before believing the numbers of a run."""
    found = []
    if run.entry.status == "failed":
        found.append(f"The run {run.entry.trouble()}.")
    if run.entry.status == "running":
        found.append(f"The run is still running: step {run.entry.steps_done:,} of {run.config.steps:,}.")
    if run.entry.status == "interrupted":
        found.append(f"The run was {run.entry.trouble()}. It can be resumed.")
    found += [f"{text[0].upper()}{text[1:]}." for text in run.damage]
    if run.entry.verdict == "diverged":
        found.append("The run diverged: its training loss rose far above the first, or every dev row got one label.")
    if run.entry.picked_start:
        found.append(f"{NOTE}.")
    if run.one_label is not None:
        label, share = run.one_label
        found.append(f"The last evaluation predicts {label} for {100 * share:.0f}% of the dev rows.")
    zero = run.gradient_stats["zero_fraction"]
    if zero is not None and zero >= 0.5:
        found.append(f"The projected gradient is exactly 0 in {100 * zero:.0f}% of all samples, which change nothing.")
    return found


def _key_numbers(run: RunDetails) -> list[dict[str, str]]:
    """Return the numbers that a reader looks for first: name, value, note."""
    found = []
    for result in run.results():
        note = "no training" if result.loss is None else f"step {result.step:,}, loss {result.loss:.4f}"
        note += f"; 95% interval {result.interval}" if result.interval else ""
        if result.name.startswith("dev best") and (gain := run.gain()) is not None:
            note = f"{gain:+.1f} points; {note}"
        if result.name.startswith("test at best") and run.examples.majority and run.metric == "accuracy":
            note += f"; always the most frequent label: {100 * run.examples.majority:.1f}%"
        found.append({"name": f"{result.name} ({run.metric})", "value": f"{100 * result.score:.1f}%", "note": note})
    summary = run.entry.summary
    if summary.get("forwards"):
        parts = [f"{summary['forwards']:,} forwards"]
        parts += [f"{summary['backwards']:,} backwards"] if summary.get("backwards") else []
        parts += [f"{summary['peak_memory_bytes'] / 1e9:.2f} GB at most"] if summary.get("peak_memory_bytes") else []
        seconds = format_duration(float(summary["seconds"]))
        found.append({"name": f"training, {summary['steps']:,} steps", "value": seconds, "note": ", ".join(parts)})
    return found


def _example(one: Prediction, colours: Mapping[str, str], longest: int) -> dict[str, Any]:
    first = (one.predicted, one.label)
    others = sorted(((share, label) for label, share in one.probabilities.items() if label not in first), reverse=True)
    return {
        "texts": [(column, _short(text, longest)) for column, text in one.texts.items()],
        "label": one.label,
        "predicted": one.predicted,
        "row": one.row,
        "confidence": f"{one.confidence:.2f}",
        "given": f"{one.probabilities[one.label]:.2f}",
        "others": ", ".join(f"{label} {share:.2f}" for share, label in others[:MOST_OTHERS]),
        "bar": [(colours.get(label, "quiet"), f"{share:.3f}") for label, share in one.probabilities.items()],
    }


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest].rstrip()} ..."


def _confusion(run: RunDetails) -> dict[str, Any] | None:
    """Return the table of labels against predictions; None without predictions."""
    counts, labels = run.examples.counts, run.config.task.labels
    if not counts:
        return None

    def cells(label: str) -> list[dict[str, Any]]:
        total = sum(counts.get((label, other), 0) for other in labels) or 1
        found = [counts.get((label, other), 0) for other in labels]
        return [{"text": f"{count:,}", "small": "", "heat": _heat(count / total), "best": False} for count in found]

    return {
        "title": "Labels against predictions",
        "corner": "",
        "columns": labels,
        "rows": [{"name": label, "cells": cells(label)} for label in labels],
    }


def _heat(share: float) -> int:
    """Return the percent of colour in a cell, for a share from 0 to 1."""
    return round(HEAT[0] + (HEAT[1] - HEAT[0]) * share)


# --- several runs ---


def _lede(runs: Sequence[RunDetails]) -> str:
    """Return one sentence about all runs."""
    statuses = Counter(run.entry.status for run in runs)
    tasks, models = (sorted({read(run) for run in runs}) for read in (lambda r: r.config.task.name, lambda r: r.model))
    states = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    return f"{states}; on {_listed(tasks)}, with {_listed(models)}."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"


def _heat_map(found: HeatMap) -> dict[str, Any]:
    scores = [mean for mean, _ in found.cells.values()]
    low, high = min(scores), max(scores)
    (across, columns), (down, rows) = found.columns, found.rows

    def cell(row: Any, column: Any) -> dict[str, Any] | None:
        if (row, column) not in found.cells:
            return None
        mean, seeds = found.cells[row, column]
        heat = _heat((mean - low) / (high - low) if high > low else 1.0)
        return {"text": f"{100 * mean:.1f}", "small": str(seeds), "heat": heat, "best": (row, column) == found.best}

    return {
        "title": found.title,
        "corner": f"{down.split('.')[-1]} \\ {across.split('.')[-1]}",
        "columns": [format_value(value) for value in columns],
        "rows": [{"name": format_value(row), "cells": [cell(row, column) for column in columns]} for row in rows],
    }
