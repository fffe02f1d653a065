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
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console

from mezo_cli.commands import sweep_workers
from mezo_cli.commands.execute import announce, execute
from mezo_cli.commands.sweep_gpus import VISIBLE, gpus_of_first_slot, plan_gpus, show_gpus_to_worker
from mezo_cli.commands.sweep_jobs import job_label, job_status, job_statuses, time_left, why_not_finished
from mezo_cli.commands.sweep_programs import check_record, with_engine_python
from mezo_cli.config import compose
from mezo_cli.config.overrides import quote
from mezo_cli.config.own_code import PYTHON, for_workers, split_python
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import is_same_run, read_config, to_yaml
from mezo_cli.config.sweep_plan import SweepPlan, plan_sweep
from mezo_cli.console import make_console, print_line, relative_path, training_output
from mezo_cli.errors import RunStopped, UserError, one_line
from mezo_cli.runs import Run, sweep_record
from mezo_cli.runs.files import is_below
from mezo_cli.runs.sweep_record import SweepJob, SweepRecord

log = logging.getLogger("mezo")

CANNOT_START = {  # errors of a plug-in that Hydra cannot load, and of a launcher's own settings
    True: (HydraException, OSError, RuntimeError),
    False: (HydraException, OSError, RuntimeError, TypeError, ValueError),
}
PROGRESS_EVERY = 5.0  # seconds between lines while jobs are validated


def sweep(
    overrides: Sequence[str],
    config_dir: str | None,
    retry_failed: bool = False,
    quiet: bool = False,
    gpus_per_job: int | None = None,
) -> int:
    """Run the jobs of a sweep, or those that are left of it; return the exit status: 1 when a job failed.

    Args:
        overrides: of the command line.
        config_dir: the user's config folder.
        retry_failed: run the jobs again that failed before.
        quiet: print the sweep's directory, warnings and errors, and nothing else.
        gpus_per_job: the GPUs that each job sees; None: all.

    Raises:
        UserError: when a job is not valid, or the directory contains a sweep over another grid; no job is started then.
    """
    with training_output(quiet):
        plan = plan_sweep(overrides, config_dir, _show_progress())
        record = with_engine_python(plan.directory, make_record(plan, config_dir), plan)
        gpus, own = plan_gpus(gpus_per_job, plan.sweeper.launcher, record.overrides)
        record = dataclasses.replace(
            record,
            retry_failed=retry_failed,
            quiet=quiet,
            gpus_per_job=gpus_per_job,
            gpus=gpus or None,
            visible_gpus=os.environ.get(VISIBLE),
            stopped=False,
        )
        record.write(plan.directory)
        if quiet:
            announce(plan.directory, quiet)
    with gpus_of_first_slot(gpus), for_workers(plan.python):
        return _run_jobs(plan.directory, record, plan.sweeper, own)


def make_record(plan: SweepPlan, config_dir: str | None) -> SweepRecord:
    """Return the record of a sweep, that of the sweep in its directory if there is one; nothing is written.

    Raises:
        UserError: when the directory contains a sweep over another grid, or a job's run with other settings.
    """
    folder = plan.directory
    jobs = None if plan.jobs is None else [_recorded(folder, *numbered) for numbered in enumerate(plan.jobs)]
    record = sweep_record.new(plan.overrides, config_dir, jobs)
    if sweep_record.exists(folder):
        record = _continue(folder, record)
    for job in plan.jobs or ():
        if job_status(job.directory) != "missing":
            _check_same_config(job.directory, job.config)
    return record


def resume(folder: Path, again: Sequence[str] = (), retry_failed: bool = False, quiet: bool = False) -> int:
    """Go on with the sweep in `folder`; return the exit status.

    Args:
        folder: of the sweep.
        again: `engine.python`; the launcher with its settings, in place of those of the record.
        retry_failed, quiet: as in `sweep`.

    Raises:
        UserError: when its record is damaged, or names what runs a program, and when the working directory that it was
            started in is gone.
    """
    record = sweep_record.read(folder)
    launcher, python = split_python(again)
    for text in launcher:
        if record.tune is not None or not _is_launcher(text):
            raise UserError(
                f"'{text}': {folder} keeps its settings, except what runs its jobs: {PYTHON}=... and, of a sweep, "
                "hydra/launcher=..., hydra.launcher.KEY=...; when a run ends is changed run by run"
            )
    kept = _relaunched(record.overrides, launcher) if launcher else record.overrides
    check_record(folder, dataclasses.replace(record, overrides=kept), launcher)
    given = [] if python is None else [f"{PYTHON}={python}"]
    overrides = [*kept, *given, f"hydra.sweep.dir={quote(folder.absolute())}"]
    if not Path(record.cwd).is_dir():
        raise UserError(f"{folder}: the sweep was started in {record.cwd}, which is no folder any more")
    with contextlib.chdir(record.cwd):  # relative paths in the overrides start there
        if record.tune is not None:
            return _resume_search(folder, record, overrides, retry_failed, quiet)
        return sweep(overrides, record.config_dir, retry_failed, quiet, record.gpus_per_job)


def _resume_search(folder: Path, record: SweepRecord, overrides: Sequence[str], retry_failed: bool, quiet: bool) -> int:
    from mezo_cli.commands import tune

    if retry_failed:
        raise UserError(f"--retry-failed: {folder} is a search of `mezo tune`, which does not repeat a failed trial")
    return tune.resume(record, overrides, quiet)


def run_job(node: DictConfig) -> float:
    """Run one job of a sweep; return the dev score of its best checkpoint, NaN if it did not finish.

    Hydra calls it in the process of the sweep.
    """
    folder = Path(HydraConfig.get().sweep.dir)
    record = sweep_record.read(folder)
    with training_output(record.quiet) as console:
        return _run_job(node, folder, record, console)


def run_job_in_worker(node: DictConfig) -> float:
    """Run one job in a process that a launcher has started; return as `run_job`, NaN also when the sweep was stopped.

    The process of the sweep reports on the job. Here only warnings and errors are printed.
    """
    folder = Path(HydraConfig.get().sweep.dir)
    with sweep_workers.as_worker():
        record = sweep_record.read(folder)
        if record.stopped:
            return math.nan
        inside = sweep_workers.in_sweep_process()
        if not inside:
            show_gpus_to_worker(folder, record)
        output = contextlib.nullcontext(make_console()) if inside else training_output(quiet=True)
        try:
            with contextlib.chdir(record.cwd), output as console:
                return _run_job(node, folder, record, console)
        except KeyboardInterrupt:  # recorded in the run; the launcher goes on to the next job
            return math.nan


def _run_job(node: DictConfig, folder: Path, record: SweepRecord, console: Console) -> float:
    hydra = HydraConfig.get()
    number = int(hydra.job.num)
    path = record.directories(folder).get(number, Path(hydra.runtime.output_dir))
    if not is_below(path, folder):
        raise UserError(f"hydra.sweep.subdir gives job {number + 1} the directory {path}, which is not in {folder}")

    def check_going_on() -> None:
        if sweep_record.read(folder).stopped:  # since this job has begun
            raise KeyboardInterrupt

    _announce(folder, record, number, list(hydra.overrides.task))
    try:
        config = compose.config_of(node)
        run = _open_or_create(path, config, record)
        if run is not None:
            execute(run, read_config(path / "config.yaml"), console, check_going_on, of_many=True)
        return (
            float(Run(path).read_summary()["dev"][config.task.metric]) if job_status(path) == "finished" else math.nan
        )
    except RunStopped as stop:
        log.warning("job %d: %s", number + 1, stop)
        return math.nan
    except Exception as error:  # whatever a job died of, the others run; its own log has the traceback
        log.error("job %d failed: %s", number + 1, one_line(error))
        return math.nan
    finally:
        gc.collect()  # a model and its hooks refer to each other; the next job needs the memory
        log.info("")


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
    if not is_same_run(read_config(path / "config.yaml"), config):
        raise UserError(f"{path} contains a run with other settings than this job's; name another hydra.sweep.dir")
    return run


def _continue(folder: Path, new: SweepRecord) -> SweepRecord:
    """Return the record to go on with in a directory that already contains a sweep.

    Raises:
        UserError: when that sweep is over another grid.
    """
    stored = sweep_record.read(folder)
    if stored.tune is not None:
        raise UserError(f"{folder} contains a search of `mezo tune`; go on with: mezo resume {folder}")
    before, now = ([job.overrides for job in record.jobs or ()] for record in (stored, new))
    if sorted(before) != sorted(now) or (not now and stored.overrides != new.overrides):
        added = next((" ".join(texts) for texts in now if texts not in before), None)
        what = (
            f"its {len(before)} jobs do not include {added}" if added else f"it has {len(before)} jobs, not {len(now)}"
        )
        raise UserError(
            f"{folder} contains a sweep over another grid: {what}; repeat its command, or name another hydra.sweep.dir"
        )
    record = dataclasses.replace(
        stored, overrides=_relaunched(stored.overrides, new.overrides), config_dir=new.config_dir
    )
    check_record(folder, record, new.overrides)
    return record


def _relaunched(stored: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the stored overrides of a sweep and behind them the launcher that is chosen now: the jobs are the same."""
    return [text for text in stored if not _is_launcher(text)] + [text for text in new if _is_launcher(text)]


def _is_launcher(text: str) -> bool:
    return text.lstrip("+~").startswith(("hydra/launcher", "hydra.launcher."))


def _run_jobs(folder: Path, record: SweepRecord, sweeper: compose.Sweeper, gpus: Sequence[str]) -> int:
    """Let Hydra's sweeper and launcher run the jobs, then show what they came to.

    `gpus` are overrides that tell the launcher how many GPUs there are.

    `hydra.main` is the documented way to a sweep, but it takes its arguments from sys.argv and exits the process on
    errors. The object that `initialize_config_dir` makes known has the same method that `hydra.main` calls.
    """
    own = [f"hydra.sweep.dir={quote(folder)}", *gpus]
    if sweeper.params:
        own.append("hydra.sweeper.params=null")  # the overrides include that grid
    if (sweeper.name, sweeper.launcher) == ("basic", "basic"):
        own.append("hydra.sweeper.max_batch_size=1")  # or it composes all jobs once more before the first one starts
    given = any(text.lstrip("+").startswith("hydra.launcher.submitit_folder=") for text in record.overrides)
    if sweeper.launcher.startswith("submitit") and not given:  # results are pickles: none that was there may be read
        own.append(f"hydra.launcher.submitit_folder={quote(folder / '.submitit' / uuid.uuid4().hex[:8] / '%j')}")
    overrides = [*compose.search_path(record.config_dir), *record.overrides, *own]

    def start(job: Callable[[DictConfig], float]) -> None:
        with compose.hydra_session() as hydra:
            hydra.multirun(config_name=compose.MAIN, task_function=job, overrides=overrides)

    try:
        if sweeper.launcher == "basic":
            start(run_job)
        else:
            with training_output(record.quiet):
                sweep_workers.launch(folder, record, lambda: start(run_job_in_worker))
    except KeyboardInterrupt:
        with training_output(record.quiet):
            left = sum(status != "finished" for _, status in job_statuses(folder, record).values())
            log.warning("%d jobs are left; go on with: mezo resume %s", left, shlex.quote(relative_path(folder)))
        raise
    except CANNOT_START[sweeper.launcher == "basic"] as error:
        name = "" if sweeper.launcher == "basic" else f"hydra/launcher={sweeper.launcher}: "
        raise UserError(f"{name}{error}") from error
    return _conclude(folder, record)


def _conclude(folder: Path, record: SweepRecord) -> int:
    """Show the comparison of the finished jobs, then the failed ones; return the exit status."""
    statuses = job_statuses(folder, record)
    finished = sum(status == "finished" for _, status in statuses.values())
    with training_output(record.quiet) as console:
        log.info("%d of %d jobs finished", finished, len(statuses))
        if any(status in ("interrupted", "missing") for _, status in statuses.values()):
            log.info("go on with: mezo resume %s", shlex.quote(relative_path(folder)))
        if finished and not record.quiet:
            from mezo_cli.commands.compare import show_folder  # imports pandas

            log.info("")
            show_folder(folder, console)
    for number, (path, status) in statuses.items():
        if status != "finished":
            label = job_label(record, number)
            name = f"job {number + 1} ({label})" if label else f"job {number + 1}"
            print_line(f"failed: {name}: {why_not_finished(path, status)}", sys.stderr)
    return 0 if finished == len(statuses) else 1


def _announce(folder: Path, record: SweepRecord, number: int, overrides: list[str]) -> None:
    """Log the number of the job, how it differs from the others, and the time that is left."""
    if record.jobs is None:
        label = " ".join(text for text in overrides if text not in record.overrides)
        log.info("job %d  %s", number + 1, label)
        return
    label = job_label(record, number)
    log.info("job %d of %d  %s%s", number + 1, len(record.jobs), label, time_left(folder, record, number))


def _show_progress() -> Callable[[int, int], None]:
    """Return a function that logs how many jobs are validated, now and then."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_EVERY:
            last = time.monotonic()
            log.info("validated %d of %d jobs", done, total)

    return show
