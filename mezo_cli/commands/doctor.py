"""`mezo doctor`: check a setup before it is trained, in plain lines or as JSON."""

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mezo_cli.config import compose
from mezo_cli.config.schema import Config
from mezo_cli.console import console_logging, log, make_console, print_line
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Section, count
from mezo_cli.errors import UserError
from mezo_cli.process.signals import import_torch
from mezo_cli.process.versions import device_name
from mezo_cli.runs import Run

if TYPE_CHECKING:  # torch is imported after the config is known to be valid
    from mezo_cli.session.opening import Prepared

WIDTH = 80
INDENT = 10  # of the text behind the verdict


def doctor(overrides: Sequence[str], seconds: float, as_json: bool, config_dir: str | None) -> None:
    """Examine the run and print the findings. Nothing is written."""
    with console_logging(Console(file=sys.stderr, width=1000) if as_json else make_console()):
        job = compose.load(overrides, config_dir)
        Run.check_free(job.directory)
        config = job.config
        if config.optimizer.picks_rate:
            raise UserError("optimizer.lr=auto: doctor judges a rate that is given; give a number")
        if config.picks_micro_batch:
            raise UserError("micro_batch_size=auto: doctor measures the memory of a number that is given; give one")
        log.info("loading %s and its data; the checks come after that, --seconds %g", _short(config), seconds)
        import_torch()
        from mezo_cli.diagnosis.prepared import diagnose, prepare_run

        prepared, loading = prepare_run(config)
        with prepared.session:
            sections = list(diagnose(prepared, loading, Deadline(seconds)))
            found = Counter(finding.verdict for section in sections for finding in section.findings)
            if not as_json:
                _show(prepared, loading, sections, found)
                return
            document = {
                "task": config.task.name,
                "objective": config.objective.name,
                "optimizer": config.optimizer.name,
                "model": config.model.path,
                "device": device_name(prepared.session.loaded.device),
                "loading_seconds": round(loading, 3),
                **{f"{verdict}s": found[verdict] for verdict in (DOUBT, UNKNOWN, NOTE)},
                "checks": [section.record() for section in sections],
            }
            print_line(json.dumps(document, indent=2))


def _show(prepared: "Prepared", loading: float, sections: list[Section], found: Counter[str]) -> None:
    config = prepared.session.config
    told = [f"{found[UNKNOWN]} unknown"] * bool(found[UNKNOWN]) + [count(found[NOTE], "note")] * bool(found[NOTE])
    summary = ", ".join([count(found[DOUBT], "doubt") if found[DOUBT] else "no doubts", *told])
    _wrap(
        f"{summary}: {config.task.name}, {config.objective.name}, {config.optimizer.name} on {_short(config)},"
        f" {device_name(prepared.session.loaded.device)}; loaded in {loading:.0f} s"
    )
    order = (DOUBT, UNKNOWN, NOTE, OK).index
    told_of = [section for section in sections if section.findings]
    for section in sorted(told_of, key=lambda section: min(order(finding.verdict) for finding in section.findings)):
        print_line(f"\n{section.title}")
        for finding in sorted(section.findings, key=lambda finding: order(finding.verdict)):
            _wrap(finding.text, f"  {finding.verdict}".ljust(INDENT))
            widths = [max(map(len, column)) for column in zip(*finding.table, strict=True)]
            for row in finding.table:
                cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
                print_line(" " * INDENT + cells)
            if finding.advice:
                _wrap(finding.advice, " " * INDENT + "-> ")


def _wrap(text: str, start: str = "") -> None:
    for line in textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)):
        print_line(line)


def _short(config: Config) -> str:
    return Path(config.model.path).name if Path(config.model.path).is_absolute() else config.model.path
