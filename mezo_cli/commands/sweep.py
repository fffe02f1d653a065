"""`mezo train -m`: run the jobs of a sweep, each in its own directory, and continue a sweep that was interrupted.

Every job is composed and validated before the first one starts. Then a launcher runs them: one of Hydra's, or submitit.
A job needs nothing from the process that started the sweep: it reads `sweep.json`, and what it came to is in its run
directory. So a repeated command skips what is finished, resumes what was interrupted and starts what is missing.
"""

import contextlib
import dataclasses
import gc
import logging
import math
import os
import shlex
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console

from mezo_cli.commands import sweep_submitit, sweep_workers
from mezo_cli.commands.execute import announce, execute
from mezo_cli.commands.new_run import check_new_runs
from mezo_cli.commands.sweep_gpus import VISIBLE, plan_gpus, show_gpus_to_worker
from mezo_cli.commands.sweep_jobs import (
    check_record,
    job_label,
    job_status,
    job_statuses,
    open_or_create,
    open_same,
    print_unfinished,
    time_left,
    with_own_code_noted,
)
from mezo_cli.config import compose
from mezo_cli.config.overrides import quote
from mezo_cli.config.own_code import PYTHON, REWARD, for_workers, own_of, split_own_code, with_own_code
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import from_yaml, read_config, to_yaml
from mezo_cli.config.sweep_plan import SweepPlan, plan_sweep
from mezo_cli.console import relative_path, training_output
from mezo_cli.errors import RunStopped, UserError, one_line
from mezo_cli.runs import Run, sweep_record
from mezo_cli.runs.files import is_below
from mezo_cli.runs.sweep_record import SweepJob, SweepRecord
from mezo_cli.system import environment

log = logging.getLogger("mezo")

CANNOT_START = {  # errors of a plug-in that Hydra cannot load, and of a launcher's own settings
    True: (HydraException, OSError, RuntimeError),
    False: (HydraException, OSError, RuntimeError, TypeError, ValueError),
}
PROGRESS_EVERY = 200  # jobs between lines while they are validated


def sweep(
    overrides: Sequence[str],
    config_dir: str | None,
    retry_failed: bool = False,
    quiet: bool = False,
    gpus_per_job: int | None = None,
) -> int:
    """Run the jobs of a sweep, or those that are left of it; return the exit status: 1 when a job failed."""
    with training_output(quiet) as console:
        plan = plan_sweep(overrides, config_dir, _log_validated)
        record = with_own_code_noted(plan.directory, make_record(plan, config_dir), plan)
        with for_workers(plan.own):
            check_new_runs(job.config for job in plan.jobs or ())
        gpus, own = plan_gpus(gpus_per_job, plan.sweeper.launcher, plan.overrides)
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
        first_slot = environment({VISIBLE: gpus[0]} if gpus else {})  # this process runs its jobs one by one
        with first_slot, for_workers(plan.own), sweep_workers.sweep_process():
            _run_jobs(plan, record, own)
        return _conclude(plan.directory, record, console)


def make_record(plan: SweepPlan, config_dir: str | None) -> SweepRecord:
    """Return the record of a sweep, that of the sweep in its directory if there is one; nothing is written."""
    folder = plan.directory
    jobs = None
    if plan.jobs is not None:
        paths = [os.path.relpath(job.directory, folder) for job in plan.jobs]
        jobs = [SweepJob(number, list(job.overrides), paths[number]) for number, job in enumerate(plan.jobs)]
    record = sweep_record.new(plan.overrides, config_dir, jobs)
    if sweep_record.exists(folder):
        record = _continue(folder, record)
    for job in plan.jobs or ():
        if job_status(job.directory) != "missing":
            open_same(job.directory, job.config)
    return record


def resume(
    folder: Path,
    again: Sequence[str] = (),
    retry_failed: bool = False,
    quiet: bool = False,
    config_dir: str | None = None,
) -> int:
    """Continue the sweep in `folder`; return the exit status.

    Args:
        folder: of the sweep.
        again: what the record does not keep: `engine.python`, a function as `objective.reward`, the launcher.
        retry_failed, quiet, config_dir: as in `sweep`.
    """
    record = sweep_record.read(folder)
    launcher, own = split_own_code(again)
    for text in launcher:
        if record.tune is not None or not _is_launcher(text):
            raise UserError(
                f"'{text}': {folder} keeps its settings, except what runs its jobs: {PYTHON}=..., "
                f"{REWARD}=FILE.py:function and, of a sweep, hydra/launcher=..., hydra.launcher.KEY=...; when a run "
                "ends is changed run by run"
            )
    check_record(folder, record)
    if record.own_config_dir and config_dir is None:
        raise UserError(f"{folder} was started with --config-dir, which is not stored: give it again, --config-dir DIR")
    config_dir = None if config_dir is None else str(Path(config_dir).expanduser().absolute())
    overrides = [
        *record.overrides,
        *launcher,
        *(f"{key}={quote(value)}" for key, value in own.items()),
        f"hydra.sweep.dir={quote(folder.absolute())}",
    ]
    if not Path(record.cwd).is_dir():
        raise UserError(f"{folder}: the sweep was started in {record.cwd}, which is no folder any more")
    with contextlib.chdir(record.cwd):  # relative paths in the overrides start there
        if record.tune is not None:
            from mezo_cli.commands import tune

            if retry_failed:
                raise UserError(
                    f"--retry-failed: {folder} is a search of `mezo tune`, which does not repeat a failed trial"
                )
            search = record.tune
            return tune.tune(overrides, config_dir, search.ranges, search.trials, search.goal, quiet)
        return sweep(overrides, config_dir, retry_failed, quiet, record.gpus_per_job)


def run_job(node: DictConfig) -> float:
    """Run one job of a sweep; return the dev score of its best checkpoint, NaN if it did not finish.

    Hydra calls it, in the process of the sweep or in one that its launcher has started.
    """
    hydra = HydraConfig.get()
    folder, number = Path(hydra.sweep.dir), int(hydra.job.num)
    own = list(hydra.overrides.task)
    return _run_job(folder, number, lambda: compose.config_of(node), Path(hydra.runtime.output_dir), own)


def run_submitted_job(folder: Path, number: int, config: str) -> None:
    """Run one job of the sweep in `folder`, by its config as YAML, in a process that submitit has started."""
    _run_job(folder, number, lambda: from_yaml(config))


def _run_job(
    folder: Path, number: int, compose_config: Callable[[], Config], proposed: Path = Path(), own: Sequence[str] = ()
) -> float:
    """Run one job. A process that a launcher has started prints warnings and errors only: that of the sweep reports.

    `proposed` is the directory, and `own` are the overrides, of a job that an adaptive sweeper proposes.
    """
    with sweep_workers.as_worker() as is_worker:
        record = sweep_record.read(folder)
        if record.stopped:
            return math.nan
        if is_worker:
            show_gpus_to_worker(folder, record)
            os.chdir(record.cwd)  # relative paths in the overrides start there
        with training_output(record.quiet or is_worker) as console:
            path = record.directories(folder).get(number, proposed)
            if not is_below(path, folder):
                raise UserError(f"hydra.sweep.subdir gives job {number + 1} the directory {path}, not in {folder}")
            _announce(folder, record, number, own)
            try:
                return _train_job(folder, path, compose_config(), record, console)
            except KeyboardInterrupt:
                if not is_worker:
                    raise
                return math.nan  # recorded in the run; the launcher continues to the next job
            except RunStopped as stop:
                log.warning("job %d: %s", number + 1, stop)
                return math.nan
            except Exception as error:  # whatever a job died of, the others run; its own log has the traceback
                log.error("job %d failed: %s", number + 1, one_line(error))
                return math.nan
            finally:
                gc.collect()  # a model and its hooks refer to each other; the next job needs the memory
                log.info("")


def _train_job(folder: Path, path: Path, config: Config, record: SweepRecord, console: Console) -> float:
    """Train in a job's directory what is left of it; return its dev score, NaN if it has failed."""

    def check_going_on() -> None:
        if sweep_record.read(folder).stopped:  # since this job has begun
            raise KeyboardInterrupt

    run = open_or_create(path, config, record)
    if run is not None:
        stored = with_own_code(read_config(path / "config.yaml"), own_of(config))
        execute(run, stored, console, check_going_on, keeps_failed=True)
    return float(Run(path).read_summary()["dev"][config.chosen_metric]) if job_status(path) == "finished" else math.nan


def _continue(folder: Path, new: SweepRecord) -> SweepRecord:
    """Return the record to continue with in a directory that already contains a sweep."""
    stored = sweep_record.read(folder)
    if stored.tune is not None:
        raise UserError(f"{folder} contains a search of `mezo tune`; continue with: mezo resume {folder}")
    before, now = ([job.overrides for job in record.jobs or ()] for record in (stored, new))
    if sorted(before) != sorted(now) or (not now and stored.overrides != new.overrides):
        added = next((" ".join(texts) for texts in now if texts not in before), None)
        what = (
            f"its {len(before)} jobs do not include {added}" if added else f"it has {len(before)} jobs, not {len(now)}"
        )
        raise UserError(
            f"{folder} contains a sweep over another grid: {what}; repeat its command, or name another hydra.sweep.dir"
        )
    check_record(folder, stored)
    return dataclasses.replace(stored, own_config_dir=new.own_config_dir)


def _is_launcher(text: str) -> bool:
    return text.lstrip("+~").startswith(("hydra/launcher", "hydra.launcher."))


def _run_jobs(plan: SweepPlan, record: SweepRecord, gpus: Sequence[str]) -> None:
    """Let a launcher run the jobs. `gpus` are overrides for it: how many GPUs there are."""
    folder, launcher = plan.directory, plan.sweeper.launcher
    overrides = [*plan.overrides, f"hydra.sweep.dir={quote(folder)}", *gpus]
    try:
        if launcher == "basic":
            _launch_by_hydra(plan, record, overrides)
        elif launcher.startswith("submitit") and plan.jobs is not None:
            start = partial(_launch_by_submitit, plan, record, overrides)
            sweep_workers.launch(folder, record, start, cancels_jobs=launcher == "submitit_slurm")
        else:
            sweep_workers.launch(folder, record, partial(_launch_by_hydra, plan, record, overrides))
    except KeyboardInterrupt:
        left = sum(status != "finished" for _, status in job_statuses(folder, record).values())
        log.warning("%d jobs are left; continue with: mezo resume %s", left, shlex.quote(relative_path(folder)))
        raise
    except CANNOT_START[launcher == "basic"] as error:
        name = "" if launcher == "basic" else f"hydra/launcher={launcher}: "
        raise UserError(f"{name}{error}") from error


def _launch_by_hydra(plan: SweepPlan, record: SweepRecord, overrides: Sequence[str]) -> None:
    """Let Hydra's sweeper and launcher run the jobs.

    `hydra.main` is the documented way to a sweep, but it takes its arguments from sys.argv and exits the process on
    errors. The object that `initialize_config_dir` makes known has the same method that `hydra.main` calls.
    """
    own = []
    if plan.sweeper.params:
        own.append("hydra.sweeper.params=null")  # the overrides include that grid
    if (plan.sweeper.name, plan.sweeper.launcher) == ("basic", "basic"):
        own.append("hydra.sweeper.max_batch_size=1")  # or it composes all jobs once more before the first one starts
    path = compose.search_path(plan.config_dir)
    with compose.hydra_session() as hydra:
        hydra.multirun(config_name=compose.MAIN, task_function=run_job, overrides=[*path, *overrides, *own])


def _launch_by_submitit(plan: SweepPlan, record: SweepRecord, overrides: Sequence[str]) -> None:
    jobs = plan.jobs or []
    own = [text for text in overrides if text.lstrip("+").startswith("hydra")]
    settings = compose.launcher_settings([*own, *jobs[0].overrides], plan.config_dir)
    if not any(text.lstrip("+").startswith("hydra.launcher.submitit_folder=") for text in own):
        # its results are pickles: none that was there may be read
        settings["submitit_folder"] = str(plan.directory / ".submitit" / uuid.uuid4().hex[:8] / "%j")
    cluster = plan.sweeper.launcher.removeprefix("submitit_")
    texts = enumerate(to_yaml(job.config) for job in jobs)
    submitted = [sweep_submitit.SubmittedJob(plan.directory, number, text) for number, text in texts]
    sweep_submitit.launch(plan.directory, cluster, settings, submitted)


def _conclude(folder: Path, record: SweepRecord, console: Console) -> int:
    """Show the comparison of the finished jobs, then the failed ones; return the exit status."""
    statuses = job_statuses(folder, record)
    finished = sum(status == "finished" for _, status in statuses.values())
    log.info("%d of %d jobs finished", finished, len(statuses))
    if any(status in ("interrupted", "missing") for _, status in statuses.values()):
        log.info("continue with: mezo resume %s", shlex.quote(relative_path(folder)))
    if finished and not record.quiet:
        from mezo_cli.commands.compare import show_folder  # imports pandas

        log.info("")
        show_folder(folder, console)
    print_unfinished(statuses, record, "job")
    return 0 if finished == len(statuses) else 1


def _announce(folder: Path, record: SweepRecord, number: int, own: Sequence[str]) -> None:
    """Log the number of the job, how it differs from the others, and the time that is left."""
    if record.jobs is None:
        log.info("job %d  %s", number + 1, " ".join(text for text in own if text not in record.overrides))
        return
    label = job_label(record, number)
    log.info("job %d of %d  %s%s", number + 1, len(record.jobs), label, time_left(folder, record, number))


def _log_validated(done: int, total: int) -> None:
    if done % PROGRESS_EVERY == 0:
        log.info("validated %d of %d jobs", done, total)
