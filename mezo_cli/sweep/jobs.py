"""Run the jobs of a sweep, each as a `mezo train` (or `mezo resume`) of its own; what one came to is in its run.json.

Jobs on this machine are forked from a process that has imported what they need. Hydra's launchers start a command each.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mezo_cli.config import compose
from mezo_cli.config.overrides import quote
from mezo_cli.config.stored import OwnCode
from mezo_cli.console import log
from mezo_cli.errors import UserError, first_line
from mezo_cli.process.environment import IN_SWEEP, discard_output, environment, visible_gpus
from mezo_cli.runs.run import Run, describe_run
from mezo_cli.sweep.plan import SweepPlan

THREADS, GPUS = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"
LAUNCHED = "mezo_job"  # the key whose values are the numbers of the jobs that a launcher starts


def job_status(path: Path) -> str:
    """Return the status of a job's run, `missing` when its directory is free, `damaged` when it cannot be read."""
    return str(describe_run(path)["status"])


def words_of(job: compose.Job, config_dir: str | None, code: OwnCode = {}) -> list[str]:  # noqa: B006 (it is only read)
    """Return the words of the command that runs a job, or goes on with its run.

    `code` is the user's own, where the command does not get it from the environment.
    """
    more = [f"{key}={quote(value)}" for key, value in code.items()]
    if is_begun(job.directory):
        return ["resume", str(job.directory), *more]
    folder = [] if config_dir is None else ["--config-dir", str(Path(config_dir).expanduser().absolute())]
    return ["train", *job.overrides, *more, f"hydra.run.dir={quote(job.directory)}", *folder]


def is_begun(path: Path) -> bool:
    """Return whether a directory has a run to go on with."""
    try:
        Run.check_free(path)
    except UserError:
        return True
    return False


# --- on this machine ---


class Workers:
    """Run commands in `at_once` processes of this machine, each with its share of the cores and of the visible GPUs.

    They are forked from a process that has imported the module `preloaded`; what they print is `shown`, or not.
    """

    def __init__(self, at_once: int, cwd: str, shown: bool, preloaded: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preloaded])
        self._cwd, self._shown = cwd, shown
        threads = {THREADS: str(max(1, len(os.sched_getaffinity(0)) // at_once))}
        self._variables = {} if at_once == 1 or THREADS in os.environ else threads
        self.shares: list[dict[str, str]] = gpu_shares(at_once)

    def start(self, words: Sequence[str], share: Mapping[str, str]) -> BaseProcess:
        """Start `mezo WORDS`, which sees a share of the GPUs."""
        with environment(self._variables):  # torch reads the number of threads when the server imports it
            # Ctrl-C reaches neither the server nor a job that begins: they inherit that the signal is blocked. The
            # server ignores it only after its imports, seconds later.
            resource_tracker.ensure_running()  # it would unblock the signal in what follows
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            variables = {**os.environ, **share, IN_SWEEP: "1"}
            process = self._context.Process(target=_run, args=(list(words), variables, self._cwd, self._shown))
            process.start()
        return process

    def run(
        self, commands: Mapping[int, list[str]], began: Callable[[int], None], ended: Callable[[int], None]
    ) -> None:
        """Run the commands of some jobs; call `began` and `ended` with the number of each.

        Raises:
            KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, when those that ran have recorded it. A second one
                kills them.
        """
        left, running = deque(commands.items()), dict[Any, tuple[BaseProcess, int, dict[str, str]]]()  # by sentinel
        try:
            while left or running:
                while left and self.shares:
                    (number, words), share = left.popleft(), self.shares.pop()
                    began(number)
                    process = self.start(words, share)
                    running[process.sentinel] = process, number, share
                for sentinel in wait(list(running)):
                    process, number, share = running.pop(sentinel)
                    process.join()
                    self.shares.append(share)
                    ended(number)
        except BaseException:
            stop([process for process, *_ in running.values()])
            raise


def stop(processes: Sequence[BaseProcess]) -> None:
    """End processes by SIGTERM, and wait for them; a second Ctrl-C kills them."""
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


def gpu_shares(at_once: int) -> list[dict[str, str]]:
    """Return for each of so many processes the variable with its GPUs; none where there are no GPUs, or all for one."""
    gpus = visible_gpus() if at_once > 1 else []
    if not gpus:
        return [{} for _ in range(at_once)]
    if at_once > len(gpus):
        raise UserError(f"--jobs {at_once}: {len(gpus)} GPUs are visible: give --jobs {len(gpus)}, or {GPUS}= for none")
    each = len(gpus) // at_once
    return [{GPUS: ",".join(gpus[i * each : (i + 1) * each])} for i in range(at_once)]


def _run(words: list[str], variables: dict[str, str], cwd: str, shown: bool) -> None:
    """Run `mezo WORDS` in this process, which ends with its exit status.

    Ctrl-C in a terminal reaches every process. It is ignored here: the process of the sweep sends SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if not shown:
        discard_output(sys.stdout)
        discard_output(sys.stderr)
    sys.argv = ["mezo", *words]
    runpy.run_module("mezo_cli", run_name="__main__")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


# --- by a launcher of Hydra's ---


def launch(plan: SweepPlan, commands: Mapping[int, list[str]], cwd: str) -> None:
    """Let the launcher of a sweep run the commands of some jobs.

    `hydra.main` is the documented way to a sweep, but it takes its arguments from sys.argv and exits the process on
    errors. The object that `initialize_config_dir` makes known has the same method that `hydra.main` calls.

    Raises:
        KeyboardInterrupt: after Ctrl-C; jobs may go on.
    """
    overrides = [
        *compose.words_for_hydra([*plan.common, *plan.jobs[0].overrides], plan.config_dir),
        f"hydra.sweep.dir={quote(plan.directory)}",
        "hydra.sweep.subdir=.",
        f"+{LAUNCHED}={','.join(map(str, commands))}",
        "hydra.sweeper.params=null",  # an experiment's grid is among the commands
    ]
    before = [job_status(job.directory) for job in plan.jobs]
    try:
        with compose.hydra_session() as hydra:
            task = partial(_launched, dict(commands), cwd)
            hydra.multirun(config_name=compose.MAIN, task_function=task, overrides=overrides)
    except Exception as error:  # of a launcher, whatever it raises: its settings are wrong, or it has lost a job
        text = f"hydra/launcher={plan.launcher}: {first_line(error)}"
        if before == [job_status(job.directory) for job in plan.jobs]:
            raise UserError(text) from error
        log.warning("%s", text)


def _launched(commands: Mapping[int, list[str]], cwd: str, node: Any) -> int:
    words = [sys.executable, "-m", "mezo_cli", *commands[int(node[LAUNCHED])], "-q"]
    return subprocess.run(words, cwd=cwd, env={**os.environ, IN_SWEEP: "1"}, check=False).returncode
