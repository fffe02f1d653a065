"""Run commands of `mezo` in processes forked from one that has torch loaded: a fork takes 20 ms, a start 4 s.

Each process has an own working directory, standard output and error (of C libraries too), and dies alone.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Collection
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from mezo_cli.__main__ import main
from mezo_cli.process.environment import environment as with_variables
from tests.campaign.file_operations import Watch
from tests.command_line import Result, environment

HUNG, LIMIT = 124, 120  # the exit status given to a command that did not end in so many seconds
COMMANDS = ("compare", "data", "evaluate", "export", "predict", "prune", "replay", "report", "runs", "show")
LATE = ("pandas", "sklearn.linear_model", "mezo_cli.sharing.model_folder", "mezo_cli.sharing.trajectory_run")
FORKING = multiprocessing.get_context("forkserver")
STARTING = threading.Lock()  # multiprocessing's list of children is not for several threads
Request = dict[str, Any]


def run(*commands: list[str], cwd: Path, kill_after: float | None = None, copies: int = 1, **how: Any) -> list[Result]:
    """Run commands one after another in one process. It may die: the results are those of the commands that began.

    Args:
        commands: the words of each, without `mezo`.
        cwd: the working directory.
        kill_after: seconds after which SIGKILL ends the process.
        copies: how many processes run the commands at once.
        how: `watch`, the arguments of `file_operations.Watch`; `ignore`, the signals that are ignored; `powerless`,
            True to run without root's rights.

    Returns:
        Exit status (minus the signal's number when one ended it), output and errors of each; of each process in turn.
    """
    words = [[str(word) for word in command] for command in commands]
    with tempfile.TemporaryDirectory(prefix="campaign") as name:
        folders = [Path(name) / str(copy) for copy in range(copies)]
        started = [_start(words, folder, cwd, how) for folder in folders]
        limit = LIMIT if kill_after is None else kill_after
        statuses = [_status(process, limit, kill_after is None) for process in started]
        return [result for folder, status in zip(folders, statuses, strict=True) for result in _results(folder, status)]


def _start(words: list[list[str]], folder: Path, cwd: Path, how: Request) -> ForkServerProcess:
    folder.mkdir()
    (folder / "ended").touch()
    root = str(Path(__file__).resolve().parents[2])
    variables = environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", COLUMNS="200")
    late = [*LATE, *(f"mezo_cli.commands.{name}" for name in COMMANDS), "mezo_cli.commands.preload"]
    FORKING.set_forkserver_preload(["__main__", __name__, *late])
    with STARTING, with_variables({**variables, "PYTHONPATH": root}):  # the first start has the server read them
        process = FORKING.Process(target=_run_all, args=(words, folder, cwd, variables, how))
        process.start()
    return process


def _status(process: ForkServerProcess, seconds: float, may_not_hang: bool) -> int:
    in_time = wait([process.sentinel], seconds)
    if not in_time:
        process.kill()
        wait([process.sentinel])
    with STARTING:
        process.join()
    assert process.exitcode is not None
    return HUNG if may_not_hang and not in_time else process.exitcode


def _results(folder: Path, status: int) -> list[Result]:
    """Return how the commands ended; the one in which the process died has the status of the process."""
    ended = [int(line) for line in (folder / "ended").read_text().split()]
    outs = sorted(folder.glob("*.out"), key=lambda path: int(path.stem))
    texts = [[path.with_suffix(end).read_text(errors="replace") for end in (".out", ".err")] for path in outs]
    return [Result(code, *text) for code, text in zip([*ended, status], texts, strict=False)]


def _run_all(words: list[list[str]], folder: Path, cwd: Path, variables: dict[str, str], how: Request) -> None:
    """Run commands in this process, and end it."""
    os.environ.update(variables)
    os.chdir(cwd)
    _handle_signals(how.get("ignore", ()))
    ended = os.open(folder / "ended", os.O_WRONLY)
    watch = Watch(**how.get("watch", {"root": str(folder / "nothing")}))
    if how.get("powerless"):
        _drop_rights()
    if "watch" in how:
        watch.install()
    for number, command in enumerate(words):
        for fd, what in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{number}.{what}", os.O_CREAT | os.O_WRONLY)
            os.dup2(file, fd)
            os.close(file)
        os.write(ended, f"{_run(command)}\n".encode())
    watch.save()
    os._exit(0)


def _handle_signals(ignored: Collection[int]) -> None:
    """Handle signals as a new process does: this one may have been started in the background, or under nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)


def _run(words: list[str]) -> object:
    sys.argv = ["mezo", *words]
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _drop_rights() -> None:
    """Give up root's capabilities, so that the modes of files hold for this process too."""
    if os.geteuid() == 0:
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
            raise OSError(ctypes.get_errno(), "capset")
