"""Run the jobs of a sweep in other processes: report what becomes of them, stop them, wait for those that are left.

A launcher (joblib, submitit, ray) starts the processes. What a job came to is read from its run directory, so a process
that is killed leaves an interrupted run, whatever the launcher makes of it.
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

from mezo_cli.commands.sweep_jobs import job_label, job_statuses, why_not_finished
from mezo_cli.console import format_duration
from mezo_cli.errors import UserError, first_line
from mezo_cli.runs import Run
from mezo_cli.runs.sweep_record import SweepRecord
from mezo_cli.system import ENDING_SIGNALS, signal_handlers

log = logging.getLogger("mezo")

POLL_SECONDS = 1.0
_is_sweep_process = False  # whether this process runs the launcher now

LOST_PROCESS = {"BrokenExecutor", "UncompletedJobError", "RayError"}  # of joblib's loky, of submitit, of ray


def launch(folder: Path, record: SweepRecord, start: Callable[[], None], cancels_jobs: bool = False) -> None:
    """Let a launcher run the jobs, and return when all have ended, those included that it does not wait for.

    Args:
        folder: of the sweep.
        record: of the sweep, as it was written.
        start: starts the launcher and returns when the jobs have ended.
        cancels_jobs: whether `start` ends the jobs itself when the record says that the sweep is stopped.

    Raises:
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP: the running jobs are recorded as interrupted by then.
        Exception: of the launcher, when it could not start the jobs.
    """
    supervisor = _Supervisor(folder, record, cancels_jobs)
    with supervisor.running():
        try:
            start()
        except Exception as error:
            if LOST_PROCESS.isdisjoint(base.__name__ for base in type(error).__mro__):
                raise
            if not supervisor.stopping:
                log.warning("a process of the sweep ended before its job: %s", first_line(error))
            while any(status == "running" for _, status in job_statuses(folder, record).values()):
                time.sleep(POLL_SECONDS)
    if supervisor.stopping:
        raise KeyboardInterrupt


@contextlib.contextmanager
def sweep_process() -> Iterator[None]:
    """Remember inside the block that this process runs the launcher."""
    global _is_sweep_process
    _is_sweep_process = True
    try:
        yield
    finally:
        _is_sweep_process = False


@contextlib.contextmanager
def as_worker() -> Iterator[bool]:
    """Handle signals as a job's process has to; yield whether a launcher has started this process for the job.

    Hydra's own launcher, and joblib with one job at a time, run jobs in the process of the sweep, where signals are
    handled already.

    Ctrl-C in a terminal reaches every process of the group. It is ignored here: the process of the sweep sends SIGTERM
    to those that train, so that none is killed while it waits. When submitit's signal (SIGUSR2: the time is over, or
    the job is preempted) comes, the run is recorded as interrupted first; submitit then queues the job again or not.
    """
    if _is_sweep_process:
        yield False
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGUSR2)
    frames: list[Any] = []

    def end_run(_: int, frame: Any) -> None:
        frames.append(frame)
        raise KeyboardInterrupt

    if callable(before):
        signal.signal(signal.SIGUSR2, end_run)
    try:
        yield True
    finally:
        signal.signal(signal.SIGUSR2, before)
        if frames and callable(before):
            before(signal.SIGUSR2, frames[0])


class _Supervisor:
    """Logs in a thread of its own when jobs start and end, and ends them at the first Ctrl-C, SIGTERM or SIGHUP.

    The launcher then returns by itself. A second signal raises KeyboardInterrupt.

    Attributes:
        stopping: whether a signal came.
    """

    def __init__(self, folder: Path, record: SweepRecord, cancels_jobs: bool) -> None:
        self.stopping = False
        self._folder, self._record, self._cancels_jobs = folder, record, cancels_jobs
        self._seen = {number: status for number, (_, status) in job_statuses(folder, record).items()}
        self._start = time.monotonic()
        self._finished = 0  # since then
        self._ended = False
        self._wake = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Supervise the jobs inside the block."""
        before = sum(status == "finished" for status in self._seen.values())
        if before:
            log.info("%d of %d jobs finished before: skipped", before, len(self._seen))
        thread = threading.Thread(target=self._run, name="sweep", daemon=True)
        thread.start()
        try:
            with signal_handlers(ENDING_SIGNALS, self._stop):
                yield
        finally:
            self._ended = True
            self._wake.set()
            thread.join()

    def _stop(self, *_: Any) -> None:
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
        if self._cancels_jobs:
            return
        for path, status in job_statuses(self._folder, self._record).values():
            if status == "running":
                with contextlib.suppress(UserError, OSError, ValueError):
                    info = Run(path).info()
                    if info.get("host") == socket.gethostname():
                        os.kill(int(info["pid"]), signal.SIGTERM)  # this process, if joblib runs one job at a time
