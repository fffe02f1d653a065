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
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.console import printable
from mezo_cli.errors import UserError
from mezo_cli.process.versions import package_version
from mezo_cli.report.document import document
from mezo_cli.report.entries import Entry, left_out, no_runs, read_runs
from mezo_cli.report.figures import COLOURS, SERIES, WIDE, Line, draw_lines, page_figure, panels, run_figures
from mezo_cli.report.groups import Group, group_runs
from mezo_cli.report.paper import find_table
from mezo_cli.report.settings import format_value
from mezo_cli.report.tables import PROTOCOL, group_view, make_table, run_rows
from mezo_cli.runs.contents import format_score, metrics_of
from mezo_cli.runs.run import utc_now

if TYPE_CHECKING:  # jinja2 is imported when a page is written
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
MOST_SECTIONS = 50  # runs that have a section of their own in a page

# Called with what is done and the number of runs; inside the block the function is called with how many are done.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Report:
    """What is reported."""

    runs: Sequence[Entry]  # the oldest first
    groups: Sequence[Group]
    panels: Mapping[str, Sequence[Line]]
    documents: Mapping[str, Mapping[str, Any]]  # by run directory: of many runs those that were picked, then the newest
    warnings: Sequence[str]  # what was left out


def read_report(folders: Sequence[Path], progress: Progress) -> Report:
    """Read all runs under `folders`, at any depth."""
    entries, warnings = read_runs(folders)
    picked = {run.location for group in group_runs(entries) for run in group.results}
    shown = sorted((run.location for run in entries[::-1]), key=lambda name: name not in picked)[:MOST_SECTIONS]
    runs, documents = [], {}
    with progress("runs read", len(entries)) as done:
        for number, run in enumerate(entries):
            try:
                if run.location in shown:
                    documents[run.location] = document(run)
                _ = run.metrics  # a file that is damaged is found here
                runs.append(run)
            except (UserError, OSError) as error:
                warnings.append(left_out(run.run, error))
            done(number + 1)
    if not runs:
        raise no_runs(folders, warnings)
    groups = group_runs(runs)
    return Report(runs, groups, panels(groups), documents, warnings)


def render(report: Report, progress: Progress) -> str:
    """Return the page; about one run alone if it is one. `progress` shows how many runs are drawn."""
    shown, sections = [run for run in report.runs if run.location in report.documents], []
    with progress("runs drawn", len(shown)) as done:
        for number, run in enumerate(shown):
            sections.append(_section(run, report.documents[run.location], number))
            done(number + 1)
    counts = Counter(run.outcome for run in report.runs)
    states = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    tasks, models = sorted({run.config.task.name for run in report.runs}), sorted({run.model for run in report.runs})
    drawn = [page_figure(f"p{number}", WIDE, draw_lines, *one) for number, one in enumerate(report.panels.items())]
    run_table = make_table("Runs", run_rows(report.runs), left=2)
    # The results first: at the right end of a wide table they would have to be scrolled to.
    first = ["run", "verdict", "dev", "before", "test"]
    several = {
        "title": f"{len(report.runs)} runs",
        "lede": f"{states}; on {', '.join(tasks)}, with {', '.join(models)}.",
        "warnings": report.warnings,
        "groups": group_view(report.groups),
        "protocol": f"{PROTOCOL[0].upper()}{PROTOCOL[1:]}",
        "panels": drawn,
        "run_table": run_table[[*first, *(name for name in run_table if name not in first)]],
        "links": {one["run"]: one["id"] for one in sections},
        "runs": sections,
    }
    content = several if len(report.runs) > 1 else {"title": sections[0]["title"], "single": sections[0]}
    source = find_table().source if any(group.paper_number for group in report.groups) else ""
    script = (TEMPLATES / "sort.js").read_text(encoding="utf-8")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()  # no other script may run
    more = {"paper": source, "version": package_version(), "script": script, "script_hash": script_hash}
    return _environment().get_template("page.html").render(**content, **more, written=utc_now()[:10])


@cache
def _environment() -> "Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    light, dark = ("; ".join(f"--{name}: {both[at]}" for name, both in COLOURS.items()) for at in (0, 1))
    swatches = "\n".join(f".s-{name} {{ --swatch: var(--{name}); }}" for name in (*SERIES, "quiet"))
    dark_scheme = f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    start = f":root {{ {light}; color-scheme: light dark; }}\n{dark_scheme}\n{swatches}\n"
    environment.globals["style"] = start + (TEMPLATES / "style.css").read_text(encoding="utf-8")
    environment.filters["numbers"] = lambda row: ", ".join(f"{name} {v:.4g}" for name, v in metrics_of(row).items())
    return environment


def _section(run: Entry, told: Mapping[str, Any], number: int) -> dict[str, Any]:
    settings = [
        {"setting": key, **{name: format_value(value) for name, value in one.items()}}
        for key, one in told["settings"].items()
    ]
    legend = list(zip(cycle(SERIES), run.config.task.labels, strict=False))
    return {
        **told,
        "id": f"run-{number + 1}",
        "template": run.config.task.template,
        "status": run.outcome if run.finished else run.trouble(),
        "key": _key_numbers(run, told),
        "figures": run_figures(run, f"r{number}"),
        "dev_rows": list(zip(*told["dev_completions"].values(), strict=False)),
        "colours": {label: name for name, label in legend},
        "legend": legend,
        "settings": make_table("", settings, left=3),
    }


def _key_numbers(run: Entry, told: Mapping[str, Any]) -> list[dict[str, str]]:
    numbers = []
    for result in sorted(told["results"], key=lambda one: not one["name"].startswith("test at best")):
        metric = run.metric if run.metric in result else run.config.shown_metric  # a removed bias has no loss
        note = "no training"
        if "loss" in result:
            note = f"step {result['step']:,}, loss {format_score('loss', result['loss'])}"
        note += f"; 95% interval {result['interval']}" * bool(result["interval"])
        value = format_score(metric, result[metric], "%")
        numbers.append({"name": f"{result['name']} ({metric})", "value": value, "note": note})
    return numbers
