"""Without the modules and flags that only Unix has, as on Windows: train, resume and eval of the demo, and the lock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mezo_cli.runs import Run
from tests.command_line import environment

HIDDEN = """
import builtins, os

plain = builtins.__import__

def hiding(name, globals=None, *rest, **named):
    # psutil is another program on Windows: that of Linux needs resource
    if name in ("fcntl", "resource", "pwd") and (globals or {}).get("__name__", "").partition(".")[0] != "psutil":
        raise ModuleNotFoundError(name)
    return plain(name, globals, *rest, **named)

builtins.__import__ = hiding
del os.O_NOFOLLOW
"""
WORDS = ["model=demo", "data=demo", "batch_size=4", "data.train_size=16", "data.eval_limit=8", "eval_every=2"]
LOCK = """
import sys
from pathlib import Path
from mezo_cli.runs.lock import RunLock

lock = RunLock(Path(sys.argv[1]), Path(sys.argv[2]))
print(lock.acquire(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the modules are hidden."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDDEN)
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).resolve().parents[1])])
    return environment(PYTHONPATH=path, USER="me", LOGNAME="me", USERNAME="me", MEZO_EAGER="1")


def run(env: dict[str, str], *words: str) -> str:
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_train_resume_and_eval(without: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    check = "import os; assert not hasattr(os, 'O_NOFOLLOW'); import fcntl"
    hidden = subprocess.run([sys.executable, "-c", check], env=without, capture_output=True, text=True)
    assert "ModuleNotFoundError: fcntl" in hidden.stderr
    limit = ["max_seconds=0.001", "at_limit=stop", f"hydra.run.dir={folder}"]
    stopped = subprocess.run(
        [sys.executable, "-m", "mezo_cli", "train", *WORDS, "steps=3", *limit],
        env=without, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert Run(folder).status() == "interrupted", stopped.stdout + stopped.stderr
    run(without, "-m", "mezo_cli", "resume", str(folder), "max_seconds=null")
    assert Run(folder).status() == "finished"
    assert "accuracy" in run(without, "-m", "mezo_cli", "eval", str(folder))


def test_the_lock(without: dict[str, str], tmp_path: Path) -> None:
    """Held by one process; another is refused, sees that it is held, and gets it once the first has ended."""
    words = [sys.executable, "-c", LOCK, str(tmp_path / ".lock"), str(tmp_path / "train.log")]
    (tmp_path / "train.log").write_text("a line\n")
    first = subprocess.Popen(words, env=without, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "True\n"
    asks = f"from pathlib import Path; from mezo_cli.runs.lock import RunLock; p = Path({str(tmp_path)!r}); "
    asks += "print(RunLock(p / '.lock', p / 'train.log').is_held())"
    assert run(without, "-c", asks) == "True\n"
    assert subprocess.run(words, env=without, input="", capture_output=True, text=True).stdout == "False\n"
    first.kill()
    first.communicate()
    assert run(without, "-c", asks) == "False\n"
    assert subprocess.run(words, env=without, input="", capture_output=True, text=True).stdout == "True\n"
