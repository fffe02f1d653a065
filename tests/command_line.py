"""The command line as a user meets it: in this process (quick), or in one of its own (signals, imports)."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import cli

HANGS = 3600.0  # seconds: only what hangs takes longer, on a machine with any load


@dataclass(frozen=True)
class Result:
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


def ok(*words: object) -> Result:
    """Run `mezo words...` in this process, check that its exit status is 0, and return how it ended."""
    done = mezo(*words)
    assert done.code == 0, done
    return done


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
    """Start `mezo words...` as a process of its own, which signals reach.

    Tests in the background ignore Ctrl-C, under nohup SIGHUP.
    """

    def hear() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    command, pipe = [sys.executable, "-m", "mezo_cli", *map(str, words)], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**extra), stdout=pipe, stderr=pipe, text=True, preexec_fn=hear
    )


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
            ok("train", *small(model, data, home / name, *words))
    return home
