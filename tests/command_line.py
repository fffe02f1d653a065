"""The command line as a user meets it: in this process (quick), or in one of its own (signals, imports)."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import cli

HANGS = 3600.0  # seconds: only what hangs takes longer, on a machine with any load


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


Train = Callable[..., Result]  # of the fixture `train`


def mezo(*words: object, run: Callable[..., Any] = cli.app) -> Result:
    """Run `mezo words...` in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv, on_term = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["mezo", *map(str, words)]
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(run)
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, on_term)
    assert isinstance(code, int)
    return Result(code, out.getvalue(), err.getvalue())


def error_line(result: Result) -> str:
    """Check that a command ended as a mistake of the user's does, exit 2 and one line, and return the line."""
    assert result.code == 2, result
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err + result.out
    return result.err


def environment(**extra: str) -> dict[str, str]:
    """The environment of a process: this one's, without a compiler's start-up time."""
    return {**os.environ, "MEZO_EAGER": "1", "PYTHONPATH": str(Path(cli.__file__).resolve().parents[1]), **extra}


def start(*words: object, cwd: Path, **extra: str) -> subprocess.Popen[str]:
    """Start `mezo words...` as a process of its own."""
    return _start([sys.executable, "-m", "mezo_cli", *map(str, words)], cwd, extra)


def _start(command: list[str], cwd: Path, extra: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a process that signals reach: tests in the background ignore Ctrl-C, under nohup SIGHUP."""

    def hear() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**extra), stdout=pipe, stderr=pipe, text=True, preexec_fn=hear
    )


STOPPER = """
import os, signal, sys
from mezo_cli.__main__ import main
from mezo_cli.runs.jsonl import JsonLines

folder, step, append = sys.argv.pop(1), int(sys.argv.pop(1)), JsonLines.append

def stop(self, kind, at, **values):
    append(self, kind, at, **values)
    if kind == "train" and at == step and str(self.path.parent.resolve()) == folder:
        os.kill(os.getpid(), signal.SIGSTOP)

JsonLines.append = stop
main()
"""


@contextlib.contextmanager
def stopped_at(run: Path, step: int, *words: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start `mezo words...`, and yield its process when it has stopped itself after the line of a step of `run`.

    So that a signal reaches it there, however slow the machine is: send one, then SIGCONT.
    """
    running = _start([sys.executable, "-c", STOPPER, str(run.resolve()), str(step), *map(str, words)], cwd, {})
    found = os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert found is not None
    assert found.si_code == os.CLD_STOPPED, f"it ended before step {step}: {running.communicate()}"
    try:
        yield running
    finally:
        if running.poll() is None:  # a test that fails leaves it stopped, and it would stay for ever
            running.kill()
            running.communicate()


def process(*words: object, cwd: Path, **extra: str) -> Result:
    """Run `mezo words...` in a process of its own."""
    running = start(*words, cwd=cwd, **extra)
    out, err = running.communicate(timeout=HANGS)
    return Result(running.returncode, out, err)


def small(model: Path, data: Path, run: Path, *more: str) -> list[str]:
    """The words that train a tiny model in the directory `run`: six steps, three evaluations, livelier than usual."""
    words = {
        "model.path": model,
        "data": "files",
        "data.dir": data,
        "hydra.run.dir": run,
        "steps": 6,
        "eval_every": 3,
        "log_every": 2,
        "batch_size": 8,
        "optimizer.lr": 1e-2,
    }
    given = {word.split("=")[0] for word in more}
    return [*(f"{key}={value}" for key, value in words.items() if key not in given), *more]


def finished_runs(home: Path, model: Path, data: Path, cases: Mapping[str, Sequence[str]]) -> Path:
    """Train a small run per case in `home`, eagerly, and return `home`: case -> further words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        for name, words in cases.items():
            done = mezo("train", *small(model, data, home / name, *words))
            assert done.code == 0, done
    return home
