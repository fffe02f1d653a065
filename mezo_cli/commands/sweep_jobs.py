"""What the jobs of a sweep came to, read from their run directories, and what its record may say of programs to run."""

import dataclasses
import logging
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mezo_cli.config.own_code import FIELDS, check_given_again, check_stored, own_code_used
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import is_same_run, read_config, to_yaml
from mezo_cli.config.sweep_plan import SweepPlan, describe_job
from mezo_cli.console import format_duration, print_line
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, find_runs, sweep_record
from mezo_cli.runs.sweep_record import SweepRecord

log = logging.getLogger("mezo")


def job_status(path: Path) -> str:
    """Return the status of a job's run, `missing` when its directory is free, `damaged` when it cannot be read."""
    if not ((path / "config.yaml").exists() and (path / "run.json").exists()):
        return "missing"
    try:
        return Run(path).status()
    except UserError:
        return "damaged"


def job_statuses(folder: Path, record: SweepRecord) -> dict[int, tuple[Path, str]]:
    """Return the directory and the status of every job; under an adaptive sweeper, of those that were started."""
    paths = record.directories(folder)
    if record.jobs is None:
        paths = dict(enumerate(run.path for run in find_runs(folder)))
    return {number: (path, job_status(path)) for number, path in paths.items()}


def job_label(record: SweepRecord, number: int) -> str:
    """Return the overrides by which a job differs from the others; empty under an adaptive sweeper."""
    return "" if record.jobs is None else describe_job([job.overrides for job in record.jobs], number)


def why_not_finished(path: Path, status: str) -> str:
    """Return in one line why a job has no result."""
    if status == "missing":
        return "it did not start; see the log above"
    try:
        return " ".join(str(Run(path).info().get("error") or status).split())
    except UserError as error:
        return str(error)


def time_left(folder: Path, record: SweepRecord, number: int) -> str:
    """Estimate the time for the jobs from `number` on, one after the other, by the last ones that finished."""
    is_done = {n: (path / "summary.json").exists() for n, path in record.directories(folder).items()}
    last = [n for n, done in is_done.items() if done and n < number][-9:]
    left = sum(not done for n, done in is_done.items() if n >= number)
    if not last or not left:
        return ""
    seconds = statistics.median(Run(record.directories(folder)[n]).read_summary()["seconds"] for n in last)
    return f"  about {format_duration(left * seconds)} left"


def open_or_create(path: Path, config: Config, record: SweepRecord) -> Run | None:
    """Return the run of a job, claimed by this process; None when there is nothing left to do for it."""
    status = job_status(path)
    if status == "missing":
        return Run.create(path, to_yaml(config), record.argv)
    run = open_same(path, config)
    if status == "finished":
        log.info("finished before: skipped")
        return None
    if status == "failed" and not record.retry_failed:
        log.info("failed before: skipped (--retry-failed runs it again)")
        return None
    config.objective.check_resumed(config, run.info(), False)
    run.claim()
    return run


def open_same(path: Path, config: Config) -> Run:
    """Open a job's run and check that it has the settings of the job: a file in conf/ may have changed since."""
    run = Run.open(path)
    if not is_same_run(read_config(path / "config.yaml"), config):
        raise UserError(f"{path} contains a run with other settings than this job's; name another hydra.sweep.dir")
    return run


def print_unfinished(statuses: Mapping[int, tuple[Path, str]], record: SweepRecord, noun: str) -> None:
    """Print a line on standard error for each job (or trial, the noun) that has no result, and why."""
    for number, (path, status) in statuses.items():
        if status != "finished":
            label = job_label(record, number)
            name = f"{noun} {number + 1} ({label})" if label else f"{noun} {number + 1}"
            print_line(f"failed: {name}: {why_not_finished(path, status)}", sys.stderr)


def check_record(folder: Path, record: SweepRecord) -> None:
    """Check that the overrides of a stored record, which may be another user's, are data."""
    texts = [*record.overrides, *(text for job in record.jobs or () for text in job.overrides)]
    check_stored(texts, folder / sweep_record.NAME)


def with_own_code_noted(folder: Path, record: SweepRecord, plan: SweepPlan) -> SweepRecord:
    """Return the record with whether the user's own code runs in the jobs; which one is not stored."""
    used: dict[str, Any] = {field: True for key, field in FIELDS.items() if key in plan.own}
    for job in plan.jobs or ():
        used |= own_code_used(job.config)
    check_given_again(f"{folder} was started", vars(record), used)
    return dataclasses.replace(record, **used)
