"""`mezo doctor`: check a setup before it is trained, in plain lines or as JSON."""

import json
import logging
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mezo_cli.config import compose
from mezo_cli.config.choices import find_choices
from mezo_cli.config.schema import Config
from mezo_cli.config.sweep_plan import describe_job, plan_sweep
from mezo_cli.console import console_logging, make_console, print_line
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Finding, Section, count
from mezo_cli.diagnosis.jobs import Jobs
from mezo_cli.runs import Run
from mezo_cli.system import device_name, import_torch

if TYPE_CHECKING:  # torch is imported after the config is known to be valid
    from mezo_cli.diagnosis.prepared import Prepared

log = logging.getLogger("mezo")

WIDTH = 80
INDENT = 10  # of the text behind the verdict


def doctor(
    overrides: Sequence[str],
    multirun: bool,
    seconds: float,
    as_json: bool,
    config_dir: str | None,
    quiet: bool = False,
) -> None:
    """Examine the run, or the first job of the sweep, and print the findings. Nothing is written."""
    with console_logging(Console(file=sys.stderr, width=1000) if as_json else make_console(), quiet):
        jobs = _jobs(overrides, multirun, config_dir)
        log.info("loading %s and its data; the checks come after that, --seconds %g", _short(jobs.config), seconds)
        import_torch()
        from mezo_cli.diagnosis.prepared import diagnose, prepare_run

        prepared = prepare_run(jobs.config)
        sections = diagnose(prepared, jobs, Deadline(seconds))
        if as_json:
            print_line(json.dumps(_document(prepared, jobs, list(sections)), indent=2))
        elif quiet:
            list(_show_sections(sections, (DOUBT, UNKNOWN)))
        else:
            _show(prepared, jobs, sections, seconds)


def _jobs(overrides: Sequence[str], multirun: bool, config_dir: str | None) -> Jobs:
    """Compose and validate the run or every job of the sweep."""
    if not multirun:
        job = compose.compose_run(overrides, config_dir)
        Run.check_free(job.directory)
        return Jobs([job.config], job.directory)
    from mezo_cli.commands.sweep import make_record

    sweep = plan_sweep(overrides, config_dir)
    make_record(sweep, config_dir)  # refuses a directory with another sweep
    if sweep.jobs is not None:
        first = describe_job([job.overrides for job in sweep.jobs], 0)
        return Jobs([job.config for job in sweep.jobs], sweep.directory, is_sweep=True, first=first)
    parsed = compose.parse(sweep.overrides, find_choices(config_dir))
    plain = [override.text for override in parsed if not override.sweeps and not override.name.startswith("hydra")]
    return Jobs([compose.build_config(plain, config_dir)], sweep.directory, is_sweep=True, is_adaptive=True)


def _document(prepared: "Prepared", jobs: Jobs, sections: list[Section]) -> dict[str, Any]:
    """Return the diagnosis as plain values."""
    config = jobs.config
    return {
        "task": config.task.name,
        "objective": config.objective.name,
        "optimizer": config.optimizer.name,
        "model": config.model.path,
        "device": device_name(prepared.session.loaded.device),
        "jobs": len(jobs.configs),
        "measured_on": jobs.first or None,
        "loading_seconds": round(prepared.seconds, 3),
        **{f"{verdict}s": _number_of(verdict, sections) for verdict in (DOUBT, UNKNOWN, NOTE)},
        "checks": [section.record() for section in sections],
    }


def _show(prepared: "Prepared", jobs: Jobs, sections: Iterator[Section], seconds: float) -> None:
    """Print each section as it is done, then what was cut and the number of findings to look at."""
    config = jobs.config
    _wrap(
        f"{config.task.name}, {config.objective.name}, {config.optimizer.name} on {_short(config)},"
        f" {device_name(prepared.session.loaded.device)}; loaded in {prepared.seconds:.0f} s"
    )
    if jobs.is_sweep:
        label = f" ({jobs.first})" if jobs.first else ""
        _wrap(
            f"a sweep of {count(len(jobs.configs), 'job')}: everything is measured on job 1{label}; forwards, time and"
            " bytes are added up over all jobs"
        )
    done = list(_show_sections(sections, (OK, NOTE, DOUBT, UNKNOWN)))
    cut = [f"{section.title}: {'; '.join(section.cut)}" for section in done if section.cut]
    if cut:
        print_line(f"not measured within --seconds {seconds:g} (raise it for more):")
        for text in cut:
            _wrap(text, "  ")
    doubts, unknowns, notes = (_number_of(verdict, done) for verdict in (DOUBT, UNKNOWN, NOTE))
    told = [f"{unknowns} unknown"] * bool(unknowns) + [count(notes, "note")] * bool(notes)
    print_line(", ".join([count(doubts, "doubt") if doubts else "no doubts", *told]))


def _show_sections(sections: Iterator[Section], verdicts: Sequence[str]) -> Iterator[Section]:
    """Print the findings with some verdicts of each section as it is done; yield the sections."""
    for section in sections:
        findings = [finding for finding in section.findings if finding.verdict in verdicts]
        if findings:
            print_line(f"\n{section.title}")
        for finding in findings:
            _show_finding(finding)
        sys.stdout.flush()
        yield section
    print_line()


def _show_finding(finding: Finding) -> None:
    verdict = f"  {finding.verdict}".ljust(INDENT)
    _wrap(finding.text, verdict)
    if finding.table:
        widths = [max(map(len, column)) for column in zip(*finding.table, strict=True)]
        for row in finding.table:
            cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            print_line(" " * INDENT + cells)
    if finding.advice:
        _wrap(finding.advice, " " * INDENT + "-> ")


def _wrap(text: str, start: str = "") -> None:
    """Print a text in lines of at most 80 characters, indented below its beginning."""
    for line in textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)):
        print_line(line)


def _number_of(verdict: str, sections: Sequence[Section]) -> int:
    return sum(finding.verdict == verdict for section in sections for finding in section.findings)


def _short(config: Config) -> str:
    """Return the model's path as it is written, or the name of its folder."""
    return Path(config.model.path).name if Path(config.model.path).is_absolute() else config.model.path
