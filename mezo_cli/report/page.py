"""Write one self-contained HTML page about some runs: no request leaves it, and its one script sorts tables.

Everything that comes from files (names, texts, labels, errors) is escaped by the template engine, and characters that
would hide or reorder text are shown as escapes.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.console import format_duration, printable
from mezo_cli.errors import UserError
from mezo_cli.report.aggregate import Group, group_runs
from mezo_cli.report.details import RunDetails, read_details
from mezo_cli.report.differences import short_name, told_settings
from mezo_cli.report.figures import run_figures
from mezo_cli.report.group_figures import Panel, panel_figure, panels
from mezo_cli.report.output import make_table
from mezo_cli.report.paper import paper
from mezo_cli.report.read import left_out, no_runs, read_runs
from mezo_cli.report.settings import (
    WITHOUT_EFFECT,
    changed_settings,
    format_loss,
    format_mean,
    format_score,
    format_setting,
    format_value,
    is_fraction,
    matches,
    scale,
)
from mezo_cli.report.svg import COLOURS, SERIES, series_name
from mezo_cli.report.tables import PROTOCOL, group_view
from mezo_cli.runs.run import utc_now
from mezo_cli.runs.scores import MARK, metrics_of
from mezo_cli.system import package_version

if TYPE_CHECKING:  # jinja2 is imported when a page is written
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
LONGEST = 400  # characters of a test row's text or a prompt that are shown
MANY, LONGEST_OF_MANY = 10, 160  # runs in a page from which on fewer characters are shown
HEAT = 46  # percent of colour in the most frequent cell of labels against predictions
MOST_SECTIONS = 50  # runs that have a section of their own in a page

# Called with what is done and the number of runs; inside the block the function is called with how many are done.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Report:
    """What is reported: the runs, oldest first, the groups that they form, their curves, and what was left out."""

    runs: Sequence[RunDetails]
    groups: Sequence[Group]
    panels: Sequence[Panel]
    warnings: Sequence[str]


def read_report(folders: Sequence[Path], progress: Progress) -> Report:
    """Read all runs under `folders`, at any depth."""
    entries, warnings = read_runs(folders)
    runs = []
    with progress("runs read", len(entries)) as done:
        for number, entry in enumerate(entries):
            try:
                runs.append(read_details(entry))
            except (UserError, OSError) as error:
                warnings.append(left_out(entry.run, error))
            done(number + 1)
    if not runs:
        raise no_runs(folders, warnings)
    groups = group_runs(run.entry for run in runs)
    return Report(runs, groups, panels(groups, {run.name: run for run in runs}), warnings)


def render(report: Report, progress: Progress) -> str:
    """Return the page; about one run alone if it is one. `progress` shows how many runs are drawn."""
    runs, numbered = _with_section(report), []
    names = dict(zip((run.name for run in report.runs), run_names(report.runs), strict=True))
    longest = LONGEST if len(runs) < MANY else LONGEST_OF_MANY
    with progress("runs drawn", len(runs)) as done:
        for number, run in enumerate(runs):
            numbered.append(_run(run, f"r{number}", longest) | {"id": f"run-{number + 1}", "heading": names[run.name]})
            done(number + 1)
    runs = report.runs
    several = {
        "title": f"{len(runs)} runs",
        "lede": _lede(runs),
        "warnings": report.warnings,
        "groups": group_view(report.groups, seeds=False),
        "protocol": f"{PROTOCOL[0].upper()}{PROTOCOL[1:]}",
        "panels": [panel_figure(panel, f"p{number}") for number, panel in enumerate(report.panels)],
        "run_table": run_table(runs, {one["details"].name: one["id"] for one in numbered}),
        "runs": numbered,
    }
    content = several if len(runs) > 1 else {"title": runs[0].title, "single": numbered[0]}
    source = paper().source if any(group.paper_number for group in report.groups) else ""
    template, script = _environment().get_template("page.html"), (TEMPLATES / "sort.js").read_text(encoding="utf-8")
    facts = {"written": utc_now()[:10], "paper": source, "version": package_version()}
    return template.render(**content, **facts, style=_style(), script=script, script_hash=_sha256(script))


def _with_section(report: Report) -> Sequence[RunDetails]:
    """Return the runs that have a section of their own: all, or of many those that were picked, then the newest."""
    if len(report.runs) <= MOST_SECTIONS:
        return report.runs
    picked = {entry.location for group in report.groups for entries in group.picks.entries for entry in entries}
    newest = list(reversed(report.runs))
    ordered = sorted(newest, key=lambda run: run.name not in picked)
    chosen = {run.name for run in ordered[:MOST_SECTIONS]}
    return [run for run in report.runs if run.name in chosen]


def _sha256(script: str) -> str:
    """Return the hash by which the page's policy lets this script run, and no other."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _environment() -> "Environment":
    import jinja2

    def shown(value: Any) -> Any:
        return printable(value) if type(value) is str else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name != "style.css",
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["numbers"] = _numbers
    return environment


def _style() -> Any:
    """Return the style sheet, with the colours of both schemes."""
    from markupsafe import Markup

    def variables(scheme: int) -> str:
        return "; ".join(f"--{name}: {values[scheme]}" for name, values in COLOURS.items())

    colours = f":root {{ {variables(0)}; color-scheme: light dark; }}\n"
    colours += f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(1)} }} }}"
    return Markup(_environment().get_template("style.css").render(colours=colours, series=[*SERIES, "quiet"]))


def _lede(runs: Sequence[RunDetails]) -> str:
    """Return one sentence about all runs."""
    statuses = Counter(run.entry.status for run in runs)
    states = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    tasks, models = sorted({run.config.task.name for run in runs}), sorted({run.model for run in runs})
    return f"{states}; on {_listed(tasks)}, with {_listed(models)}."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"


def run_names(runs: Sequence[RunDetails]) -> list[str]:
    """Return each run in the settings in which it differs from the others: `lr=1e-05, seed=13`.

    With its directory where that is not enough.
    """
    told = told_settings([run.entry.settings for run in runs])
    keys = [key for key in told[0] if not matches(key, (*WITHOUT_EFFECT, "eval_every"))] or list(told[0])
    pairs = [
        (", ".join(format_setting(key, one[key]) for key in keys if key in run.entry.settings), run)
        for one, run in zip(told, runs, strict=True)
    ]
    counts = Counter(name for name, _ in pairs)
    return [name if counts[name] == 1 else ", ".join(filter(None, (name, run.name))) for name, run in pairs]


def run_table(runs: Sequence[RunDetails], links: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns and rows of the table of all runs, with every setting that differs.

    Args:
        runs: the runs.
        links: the location of a run -> the id of its section in the page.
    """
    rows = [
        {
            "run": run.name,
            "status": run.entry.status,
            **{short_name(key): format_value(value) for key, value in told.items()},
            "step": f"{run.entry.steps_done:,}",
            "dev": format_mean(
                run.metric, None if run.best is None else run.best[run.metric], marked=run.entry.picked_start
            ),
            "at step": "-" if run.best is None else f"{run.best['step']:,}",
            "dev loss": "-" if run.best is None else format_loss(run.best["loss"]),
            "test": format_mean(run.metric, run.entry.score("test"), marked=run.entry.picked_start),
            "seconds": f"{run.total_seconds:,.0f}",
        }
        for run, told in zip(runs, told_settings([run.entry.settings for run in runs]), strict=True)
    ]
    return {"columns": list(rows[0]), "words": 2, "rows": [(links.get(row["run"]), row) for row in rows]}


# --- one run ---


def _run(run: RunDetails, name: str, longest: int) -> dict[str, Any]:
    """Return what the template shows of a run. `name` is unique in the page; texts are cut at `longest` characters."""
    changed = changed_settings(run.config)
    settings = [{"setting": key, "value": format_value(v), "default": format_value(usual)} for key, v, usual in changed]
    return {
        "details": run,
        "longest": longest,
        "summary": f"{run.name}: {summary_line(run)}",
        "status": run.entry.status if run.entry.finished else run.entry.trouble(),
        "key": _key_numbers(run),
        "figures": run_figures(run, name),
        "dev_rows": list(zip(*run.completions.values(), strict=False)),
        "confusion": _confusion(run),
        "colours": {label: series_name(number) for number, label in enumerate(run.config.task.labels)},
        "legend": [(series_name(number), label) for number, label in enumerate(run.config.task.labels)],
        "settings": make_table("", settings, left=3),
    }


def summary_line(run: RunDetails) -> str:
    """Return status and result of a run in one line."""
    if not run.entry.finished:
        return run.entry.trouble()
    mark = f" {MARK}" if run.entry.picked_start else ""
    scores = {split: run.entry.score(split) for split in ("dev", "test")}
    shown = {split: format_score(run.metric, score) for split, score in scores.items() if score is not None}
    parts = [f"{split} {score}{mark}" for split, score in shown.items()]
    parts += [f"lr {run.config.optimizer.lr:g}"] if run.config.steps else []
    return ", ".join([*parts, f"seed {run.config.seed}"])


def _key_numbers(run: RunDetails) -> list[dict[str, str]]:
    """Return the numbers that a reader looks for first: name, value, note."""
    numbers, start = [], run.dev[0][run.metric] if run.dev else 0.0
    results = run.results()
    for result in sorted(results, key=lambda one: not one.name.startswith("test at best")):  # the result comes first
        metric = run.metric if run.metric in result.scores else run.config.shown_metric  # a removed bias has no loss
        score, loss = result.scores[metric], result.scores.get("loss")
        note = "no training" if loss is None else f"step {result.step:,}, loss {format_loss(loss)}"
        note += f"; 95% interval {result.interval}" if result.interval else ""
        if result.name.startswith("dev best"):
            change = scale(run.metric) * (score - start)
            note = f"{f'{change:+.1f} points' if is_fraction(run.metric) else f'{change:+.3g}'}; {note}"
        if result.name.startswith("test at best") and run.examples.majority and run.metric == "accuracy":
            note += f"; always the most frequent label: {100 * run.examples.majority:.1f}%"
        numbers.append({"name": f"{result.name} ({metric})", "value": format_score(metric, score, "%"), "note": note})
    summary = run.entry.summary
    if summary.get("forwards"):
        parts = [f"{summary['forwards']:,} forwards"]
        parts += [f"{summary['backwards']:,} backwards"] if summary.get("backwards") else []
        parts += [f"{summary['peak_memory_bytes'] / 1e9:.2f} GB at most"] if summary.get("peak_memory_bytes") else []
        seconds = format_duration(float(summary["seconds"]))
        numbers.append({"name": f"training, {summary['steps']:,} steps", "value": seconds, "note": ", ".join(parts)})
    return numbers


def _numbers(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics_of(row).items())


def _confusion(run: RunDetails) -> dict[str, Any] | None:
    """Return the table of labels (rows) against predictions; None without predictions."""
    counts, labels = run.examples.counts, run.config.task.labels
    if not counts:
        return None
    most = max(counts.values())
    rows = [[(n, round(HEAT * n / most)) for n in (counts.get((label, one), 0) for one in labels)] for label in labels]
    return {"title": "Labels against predictions", "labels": labels, "rows": list(zip(labels, rows, strict=True))}
