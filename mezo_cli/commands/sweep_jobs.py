"""What the jobs of a sweep came to. It is read from their run directories, whichever process ran them."""

import statistics
from datetime import datetime
from pathlib import Path

from mezo_cli.config.sweep_plan import describe_job
from mezo_cli.console import format_duration
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, find_runs
from mezo_cli.runs.sweep_record import SweepRecord


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
    paths = record.directories(folder)
    done = [path for n, path in paths.items() if n < number and (path / "summary.json").exists()][-9:]
    left = sum(not (path / "summary.json").exists() for n, path in paths.items() if n >= number)
    seconds = [_duration(path) for path in done]
    return f"  about {format_duration(left * statistics.median(seconds))} left" if seconds and left else ""


def _duration(path: Path) -> float:
    """Return the seconds from a run's start to its end; for a resumed run the pause is included."""
    try:
        start, end = (datetime.fromisoformat(str(Run(path).info().get(key))) for key in ("start", "end"))
    except (UserError, ValueError):
        return 0.0
    return (end - start).total_seconds()
