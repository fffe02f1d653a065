"""Run the jobs of a sweep in other processes: report what becomes of them, stop them, wait for those that are left.

Hydra's launchers (joblib, submitit, ray) start the processes. What a job came to is read from its run directory, so a
process that is killed leaves an interrupted run, whatever the launcher makes of it.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mezo_cli.commands.slurm_queue import SlurmQueue
from mezo_cli.commands.sweep_jobs import job_label, job_statuses, why_not_finished
from mezo_cli.console import format_duration
from mezo_cli.errors import UserError, first_line
from mezo_cli.runs import Run
from mezo_cli.runs.sweep_record import SweepRecord
from mezo_cli.system import ENDING_SIGNALS, signal_handlers

log = logging.getLogger("mezo")

POLL_SECONDS = 1.0
_launching = False  # in the process that started the launcher: while it runs

LOST_PROCESS = {"BrokenExecutor", "UncompletedJobError", "RayError"}  # of joblib's loky, of submitit, of ray


def launch(folder: Path, record: SweepRecord, start: Callable[[], None]) -> None:
    """Let a launcher run the jobs, and return when all have ended, those included that it does not wait for.

    Args:
        folder: of the sweep.
        record: of the sweep, as it was written.
        start: starts the launcher and returns when the jobs have ended.

    Raises:
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP: the running jobs are recorded as interrupted by then.
        Exception: of the launcher, when it could not start the jobs.
    """
    with _submitted_jobs() as submitted, _Supervisor(folder, record, submitted).running() as supervisor:
        try:
            with _as_sweep_process():
                start()
        except Exception as error:
            if LOST_PROCESS.isdisjoint(kind.__name__ for kind in type(error).__mro__):
                raise
            if not supervisor.stopping:
                log.warning("a process of the sweep ended before its job: %s", first_line(error))
            _wait_for_others(folder, record, submitted)
        except KeyboardInterrupt:  # asked a second time
            for job in submitted:
                job.cancel(check=False)
            raise
    if supervisor.stopping:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _as_sweep_process() -> Iterator[None]:
    global _launching
    _launching = True
    try:
        yield
    finally:
        _launching = False


def in_sweep_process() -> bool:
    """Return whether this process started the launcher: joblib runs jobs in it if there is one at a time."""
    return _launching


@contextlib.contextmanager
def as_worker() -> Iterator[None]:
    """Handle signals as a job's process has to; in the process of the sweep they are handled already.

    Ctrl-C in a terminal reaches every process of the group. It is ignored here: the process of the sweep sends SIGTERM
    to those that train, so that none is killed while it waits. When submitit's signal (SIGUSR2: the time is over, or
    the job is preempted) comes, the run is recorded as interrupted first; submitit then queues the job again or not.
    """
    if in_sweep_process():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGUSR2)
    came: list[Any] = []

    def end_run(_: int, frame: Any) -> None:
        came.append(frame)
        raise KeyboardInterrupt

    if callable(before):
        signal.signal(signal.SIGUSR2, end_run)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)
        if came and callable(before):
            before(signal.SIGUSR2, came[0])


# --- report and stop ---


class _Supervisor:
    """Logs in a thread of its own when jobs start and end, and ends them at the first Ctrl-C, SIGTERM or SIGHUP.

    The launcher then returns by itself. A second signal raises KeyboardInterrupt.

    Attributes:
        stopping: whether a signal came.
    """

    def __init__(self, folder: Path, record: SweepRecord, submitted: list[Any]) -> None:
        self.stopping = False
        self._folder, self._record, self._submitted = folder, record, submitted
        self._seen = {number: status for number, (_, status) in job_statuses(folder, record).items()}
        self._start = time.monotonic()
        self._finished = 0  # since then
        self._ended = False
        self._wake = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator["_Supervisor"]:
        """Supervise the jobs inside the block."""
        before = sum(status == "finished" for status in self._seen.values())
        if before:
            log.info("%d of %d jobs finished before: skipped", before, len(self._seen))
        thread = threading.Thread(target=self._run, name="sweep", daemon=True)
        thread.start()
        try:
            with signal_handlers(ENDING_SIGNALS, self._ask):
                yield self
        finally:
            self._ended = True
            self._wake.set()
            thread.join()

    def _ask(self, *_: Any) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        self._wake.set()

    def _run(self) -> None:
        stopped = False
        while not self._ended:
            self._report()
            if self.stopping and not stopped:
                stopped = True
                self._end_jobs()
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
        self._report()

    def _report(self) -> None:
        """Log each job that started, finished or failed since the last call."""
        statuses = job_statuses(self._folder, self._record)
        left = sum(status != "finished" for _, status in statuses.values())
        for number, (path, status) in statuses.items():
            if status != self._seen.get(number):
                self._seen[number] = status
                self._log(number, path, status, len(statuses), left)

    def _log(self, number: int, path: Path, status: str, jobs: int, left: int) -> None:
        of = "" if self._record.jobs is None else f" of {jobs}"
        name = f"job {number + 1}{of}  {job_label(self._record, number)}".rstrip()
        if status == "running":
            log.info("%s  started", name)
        elif status == "finished":
            self._finished += 1
            seconds = (time.monotonic() - self._start) * left / self._finished
            rest = f"  about {format_duration(seconds)} left" if left and self._record.jobs is not None else ""
            log.info("%s  finished%s", name, rest)
        elif status == "failed":
            log.warning("%s  failed: %s", name, why_not_finished(path, status))

    def _end_jobs(self) -> None:
        """End the jobs that run, and let those that start from now on end at once."""
        log.warning("stopping: waiting until the running jobs are recorded as interrupted; Ctrl-C again ends at once")
        dataclasses.replace(self._record, stopped=True).write(self._folder)
        slurm = list(filter(_is_slurm, self._submitted))
        for job in slurm:  # it may be queued, or run on another machine; Slurm sends SIGTERM
            job.cancel(check=False)
        if slurm:
            return
        for path, status in job_statuses(self._folder, self._record).values():
            if status == "running":
                with contextlib.suppress(UserError, OSError, ValueError):
                    _terminate(Run(path).info())


def _is_slurm(job: Any) -> bool:
    return type(job).__name__ == "SlurmJob"


def _terminate(info: dict[str, Any]) -> None:
    if info.get("host") != socket.gethostname():
        return
    if info["pid"] == os.getpid():  # joblib with one job at a time: end what its thread waits for, too
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    else:
        os.kill(int(info["pid"]), signal.SIGTERM)


# --- jobs that the launcher does not wait for ---


@contextlib.contextmanager
def _submitted_jobs() -> Iterator[list[Any]]:
    """Yield a list that gets the jobs which submitit submits inside the block.

    Hydra's launcher keeps them to itself. After one that was lost it raises and leaves the others running.
    """
    jobs: list[Any] = []
    try:
        from submitit import AutoExecutor
    except ModuleNotFoundError:
        yield jobs
        return
    submit, queue = AutoExecutor.map_array, SlurmQueue()

    def map_array(self: Any, *args: Any) -> Any:
        with _without_ctrl_c():
            found = submit(self, *args)
        for job in filter(_is_slurm, found):
            queue.watch(job)
        jobs.extend(found)
        return found

    AutoExecutor.map_array = map_array  # type: ignore[method-assign, assignment]
    try:
        yield jobs
    finally:
        AutoExecutor.map_array = submit  # type: ignore[method-assign]


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


def _wait_for_others(folder: Path, record: SweepRecord, submitted: list[Any]) -> None:
    """Wait until no job of the sweep runs any more."""
    if any(not job.done() for job in submitted):
        log.info("waiting for the other jobs")
    while any(not job.done() for job in submitted):
        time.sleep(POLL_SECONDS)
    while any(status == "running" for _, status in job_statuses(folder, record).values()):
        time.sleep(POLL_SECONDS)
