"""Run the jobs of a sweep by submitit: each in a process on this machine, or in an array of Slurm jobs.

Hydra's plug-in gives the settings (`hydra.launcher.*`). Its own launch keeps the jobs to itself: Ctrl-C could not
cancel them, and after one that was lost it raises and leaves the others running.
"""

import contextlib
import dataclasses
import logging
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.runs import sweep_record

if TYPE_CHECKING:
    from submitit import Job

log = logging.getLogger("mezo")

POLL_SECONDS = 1.0
QUEUE_SECONDS = 5.0  # between two looks at Slurm's queue


@dataclasses.dataclass(frozen=True)
class SubmittedJob:
    """A job as it is sent to another process. `checkpoint` lets Slurm queue it again after a time limit.

    Attributes:
        folder: of the sweep.
        number: of the job.
        config: its config, as YAML.
    """

    folder: Path
    number: int
    config: str

    def __call__(self) -> None:
        """Run the job."""
        from mezo_cli.commands.sweep import run_submitted_job  # imports Hydra

        run_submitted_job(self.folder, self.number, self.config)

    def checkpoint(self) -> Any:
        """Return what submitit submits when the time is over: the same job, which resumes its run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def launch(folder: Path, cluster: str, settings: Mapping[str, Any], jobs: Sequence[SubmittedJob]) -> None:
    """Submit the jobs of a sweep, and return when all are over; one that was lost is logged.

    Args:
        folder: of the sweep.
        cluster: `local` or `slurm`.
        settings: `hydra.launcher`.
        jobs: at least one.

    Raises:
        KeyboardInterrupt: after a second Ctrl-C; the jobs are cancelled.
    """
    with _without_ctrl_c():
        submitted = _executor(cluster, settings).submit_array(list(jobs))
    try:
        _wait(folder, submitted, SlurmQueue() if cluster == "slurm" else None)
    except KeyboardInterrupt:
        _cancel(submitted)
        raise


def _executor(cluster: str, settings: Mapping[str, Any]) -> Any:
    """Return submitit's executor with the settings; those of one cluster have its name before theirs."""
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from submitit import AutoExecutor

    shared = {field.name for field in dataclasses.fields(BaseQueueConf)}
    options = {key if key in shared else f"{cluster}_{key}": value for key, value in settings.items() if key[0] != "_"}
    at_start = {key: options.pop(key) for key in (f"{cluster}_max_num_timeout",) if key in options}
    executor = AutoExecutor(options.pop("submitit_folder"), cluster=cluster, **at_start)
    executor.update_parameters(**options)
    return executor


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block SIGINT for the processes that are started inside the block; for this one it comes after the block.

    submitit's controller kills its job within a second of a Ctrl-C, which is too short to record an interruption.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(folder: Path, jobs: Sequence["Job[None]"], queue: "SlurmQueue | None") -> None:
    """Wait for the jobs. When the sweep is stopped, Slurm's are cancelled: they may be queued, or run elsewhere."""
    left, stopped = list(jobs), False
    while left:
        time.sleep(POLL_SECONDS)
        if not stopped and sweep_record.read(folder).stopped:
            stopped = True
            if queue is not None:
                _cancel(left)
        for job in [job for job in left if (queue.is_over(job) if queue is not None else job.done())]:
            left.remove(job)
            lost = None if stopped else _why_lost(job)
            if lost is not None:
                log.warning("a process of the sweep ended before its job: %s", lost)


def _cancel(jobs: Sequence["Job[None]"]) -> None:
    for job in jobs:
        job.cancel(check=False)


def _why_lost(job: "Job[None]") -> str | None:
    """Return why a job that is over has not returned; None if it has."""
    if not job.paths.result_pickle.exists():
        return f"submitit's job {job.job_id} left no result; its output is in {job.paths.stderr.parent}"
    error = job.exception()
    lines = str(error).strip("-\n ").splitlines() if error is not None else None
    return None if lines is None else f"{lines[-1]} ({job.paths.stderr})"


class SlurmQueue:
    """The jobs in Slurm's queue: pending, running or completing.

    submitit asks the accounting (sacct). A small cluster has none, and there submitit waits for ever for a job that was
    killed or cancelled.
    """

    def __init__(self) -> None:
        self._ids: set[str] | None = None  # None: the queue cannot be read now
        self._read_at = 0.0

    def is_over(self, job: "Job[None]") -> bool:
        """Return whether a job has a result or has left the queue."""
        if time.monotonic() - self._read_at > QUEUE_SECONDS:
            self._read_at, self._ids = time.monotonic(), _read_queue()
        return job.paths.result_pickle.exists() or (self._ids is not None and job.job_id not in self._ids)


def _read_queue() -> set[str] | None:
    command = ["squeue", "--noheader", "--array", "--format=%i"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return set(done.stdout.split())
