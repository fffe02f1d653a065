"""`mezo train -m`: run the jobs of a sweep, each in its own directory, and go on with a sweep that was interrupted.

Every job is composed and validated before the first one starts. Then Hydra's sweeper and launcher run `run_job` for
each. A job needs nothing from the process that started the sweep: it reads `sweep.json`, and what it came to is in its
run directory. So a repeated command skips what is finished, resumes what was interrupted and starts what is missing.
"""

import contextlib
import dataclasses
import gc
import logging
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from mezo_cli import report
from mezo_cli.commands.execute import announce, execute, relative
from mezo_cli.config import compose
from mezo_cli.config.overrides import quote
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import read_config, to_yaml
from mezo_cli.config.sweep_plan import SweepPlan, describe_job, plan_sweep
from mezo_cli.console import format_duration, print_line, training_output
from mezo_cli.errors import RunStopped, UserError
from mezo_cli.runs import Run, find_runs, sweep_record
from mezo_cli.runs.sweep_record import SweepJob, SweepRecord

log = logging.getLogger("mezo")

PROGRESS_EVERY = 5.0  # seconds between lines while jobs are validated


def sweep(overrides: Sequence[str], config_dir: str | None, retry_failed: bool = False, quiet: bool = False) -> int:
    """Run the jobs of a sweep, or those that are left of it; return the exit status: 1 when a job failed.

    If `quiet`, the sweep's directory, warnings and errors are printed, and nothing else.

    Raises:
        UserError: when a job is not valid, or the directory contains a sweep over another grid; no job is started then.
    """
    with training_output(quiet):
        plan = plan_sweep(overrides, config_dir, _show_progress())
        record = dataclasses.replace(make_record(plan, config_dir), retry_failed=retry_failed, quiet=quiet)
        record.write(plan.directory)
        if quiet:
            announce(plan.directory, quiet)
    return _run_jobs(plan.directory, record, plan.sweeper)


def make_record(plan: SweepPlan, config_dir: str | None) -> SweepRecord:
    """Return the record of a sweep, that of the sweep in its directory if there is one; nothing is written.

    Raises:
        UserError: when the directory contains a sweep over another grid, or a job's run with other settings.
    """
    folder = plan.directory
    record = SweepRecord(
        overrides=[text for text in plan.overrides if not text.startswith("hydra.sweep.dir=")],
        argv=list(sys.argv),
        cwd=os.getcwd(),
        config_dir=None if config_dir is None else str(Path(config_dir).expanduser().absolute()),
        jobs=None if plan.jobs is None else [_recorded(folder, *numbered) for numbered in enumerate(plan.jobs)],
    )
    if sweep_record.exists(folder):
        record = _continue(folder, record)
    for job in plan.jobs or ():
        if job_status(job.directory) != "missing":
            _check_same_config(job.directory, job.config)
    return record


def resume(folder: Path, retry_failed: bool = False, quiet: bool = False) -> int:
    """Go on with the sweep in `folder`; return the exit status.

    Raises:
        UserError: when its record is damaged, or the working directory that it was started in is gone.
    """
    record = sweep_record.read(folder)
    overrides = [*record.overrides, f"hydra.sweep.dir={quote(folder.absolute())}"]
    if not Path(record.cwd).is_dir():
        raise UserError(f"{folder}: the sweep was started in {record.cwd}, which is no folder any more")
    with contextlib.chdir(record.cwd):  # relative paths in the overrides start there
        return sweep(overrides, record.config_dir, retry_failed, quiet)


def run_job(node: DictConfig) -> float:
    """Run one job of a sweep; return the dev score of its best checkpoint, NaN if it failed.

    Hydra calls it, in the process of the sweep or in another one.
    """
    hydra = HydraConfig.get()
    folder, number = Path(hydra.sweep.dir), int(hydra.job.num)
    record = sweep_record.read(folder)
    path = record.directories(folder).get(number, Path(hydra.runtime.output_dir))
    with training_output(record.quiet) as console:
        _announce(folder, record, number, list(hydra.overrides.task))
        try:
            config = compose.config_of(node)
            run = _open_or_create(path, config, record)
            if run is not None:
                execute(run, config, console)
            return (
                float(Run(path).read_summary()["dev"][config.task.metric])
                if job_status(path) == "finished"
                else math.nan
            )
        except RunStopped as stop:
            log.warning("job %d: %s", number + 1, stop)
            return math.nan
        except Exception as error:  # whatever a job died of, the others run; its own log has the traceback
            log.error("job %d failed: %s", number + 1, " ".join(str(error).split()))
            return math.nan
        finally:
            gc.collect()  # a model and its hooks refer to each other; the next job needs the memory
            log.info("")


def job_status(path: Path) -> str:
    """Return the status of a job's run, `missing` when its directory is free, `damaged` when it cannot be read."""
    if not ((path / "config.yaml").exists() and (path / "run.json").exists()):
        return "missing"
    try:
        return Run(path).status()
    except UserError:
        return "damaged"


def _recorded(folder: Path, number: int, job: compose.Job) -> SweepJob:
    return SweepJob(number, list(job.overrides), os.path.relpath(job.directory, folder))


def _open_or_create(path: Path, config: Config, record: SweepRecord) -> Run | None:
    """Return the run of a job, claimed by this process; None when there is nothing left to do for it."""
    status = job_status(path)
    if status == "missing":
        return Run.create(path, to_yaml(config), record.argv)
    run = _check_same_config(path, config)
    if status == "finished":
        log.info("finished before: skipped")
        return None
    if status == "failed" and not record.retry_failed:
        log.info("failed before: skipped (--retry-failed runs it again)")
        return None
    run.claim()
    return run


def _check_same_config(path: Path, config: Config) -> Run:
    """Open a job's run and check that it has the settings of the job: a file in conf/ may have changed since."""
    run = Run.open(path)
    if read_config(path / "config.yaml") != config:
        raise UserError(f"{path} contains a run with other settings than this job's; name another hydra.sweep.dir")
    return run


def _continue(folder: Path, new: SweepRecord) -> SweepRecord:
    """Return the record to go on with in a directory that already contains a sweep.

    Raises:
        UserError: when that sweep is over another grid.
    """
    stored = sweep_record.read(folder)
    before, now = ([job.overrides for job in record.jobs or ()] for record in (stored, new))
    if sorted(before) != sorted(now) or (not now and stored.overrides != new.overrides):
        added = next((" ".join(texts) for texts in now if texts not in before), None)
        what = (
            f"its {len(before)} jobs do not include {added}" if added else f"it has {len(before)} jobs, not {len(now)}"
        )
        raise UserError(
            f"{folder} contains a sweep over another grid: {what}; repeat its command, or name another hydra.sweep.dir"
        )
    return stored


def _run_jobs(folder: Path, record: SweepRecord, sweeper: compose.Sweeper) -> int:
    """Let Hydra's sweeper and launcher run the jobs, then show what they came to.

    `hydra.main` is the documented way to a sweep, but it takes its arguments from sys.argv and exits the process on
    errors. The object that `initialize_config_dir` makes known has the same method that `hydra.main` calls.
    """
    own = [f"hydra.sweep.dir={quote(folder)}"]
    if sweeper.params:
        own.append("hydra.sweeper.params=null")  # the overrides include that grid
    if (sweeper.name, sweeper.launcher) == ("basic", "basic"):
        own.append("hydra.sweeper.max_batch_size=1")  # or it composes all jobs once more before the first one starts
    overrides = [*compose.search_path(record.config_dir), *record.overrides, *own]
    try:
        with compose.hydra_session() as hydra:
            hydra.multirun(config_name=compose.MAIN, task_function=run_job, overrides=overrides)
    except KeyboardInterrupt:
        with training_output(record.quiet):
            left = sum(status != "finished" for _, status in _statuses(folder, record).values())
            log.warning("%d jobs are left; go on with: mezo resume %s", left, shlex.quote(relative(folder)))
        raise
    except (HydraException, OSError, RuntimeError) as error:  # of Hydra's own: a plug-in that it cannot load
        raise UserError(str(error)) from error
    return _conclude(folder, record)


def _conclude(folder: Path, record: SweepRecord) -> int:
    """Show the comparison of the finished jobs, then the failed ones; return the exit status."""
    statuses = _statuses(folder, record)
    finished = sum(status == "finished" for _, status in statuses.values())
    with training_output(record.quiet) as console:
        log.info("%d of %d jobs finished", finished, len(statuses))
        if finished and not record.quiet:
            log.info("")
            report.show(report.comparison([folder], width=console.width, warn=log.warning), console)
    for number, (path, status) in statuses.items():
        if status != "finished":
            label = "" if record.jobs is None else f" ({describe_job([job.overrides for job in record.jobs], number)})"
            print_line(f"failed: job {number + 1}{label}: {_reason(path, status)}", sys.stderr)
    return 0 if finished == len(statuses) else 1


def _reason(path: Path, status: str) -> str:
    """Return in one line why a job has no result."""
    if status == "missing":
        return "it did not start; see the log above"
    try:
        return " ".join(str(Run(path).info().get("error") or status).split())
    except UserError as error:
        return str(error)


def _statuses(folder: Path, record: SweepRecord) -> dict[int, tuple[Path, str]]:
    """Return the directory and the status of every job; under an adaptive sweeper, of those that were started."""
    paths = record.directories(folder)
    if record.jobs is None:
        paths = dict(enumerate(run.path for run in find_runs(folder)))
    return {number: (path, job_status(path)) for number, path in paths.items()}


def _announce(folder: Path, record: SweepRecord, number: int, overrides: list[str]) -> None:
    """Log the number of the job, how it differs from the others, and the time that is left."""
    if record.jobs is None:
        label = " ".join(text for text in overrides if text not in record.overrides)
        log.info("job %d  %s", number + 1, label)
        return
    label = describe_job([job.overrides for job in record.jobs], number)
    log.info("job %d of %d  %s%s", number + 1, len(record.jobs), label, _time_left(folder, record, number))


def _time_left(folder: Path, record: SweepRecord, number: int) -> str:
    """Estimate the time for the jobs from `number` on by the last ones that finished."""
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


def _show_progress() -> Callable[[int, int], None]:
    """Return a function that logs how many jobs are validated, now and then."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_EVERY:
            last = time.monotonic()
            log.info("validated %d of %d jobs", done, total)

    return show
