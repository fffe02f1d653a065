"""What the user sees while a run goes: a bar on a terminal, plain lines elsewhere."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from mezo_cli import terminal
from tests.door import environment, small


def on_a_terminal(words: list[str], cwd: Path) -> tuple[int, str]:
    """Run `mezo words...` on a pseudo-terminal of 100 columns; return its status and all that was written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [sys.executable, "-m", "mezo_cli", *words]
    env = environment(TERM="xterm-256color")
    process = subprocess.Popen(command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    os.close(ours)
    return process.wait(), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())


def test_a_terminal_has_a_bar(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = ["train", *small(roberta, movies, tmp_path / "run", "steps=12", "eval_every=6")]
    code, seen = on_a_terminal(words, tmp_path)
    assert code == 0, seen
    bars = re.findall(r"(\d+)/12 loss (\S+) dev (\S+) (\S+) steps/s (-:--:--|\d:\d\d:\d\d)", seen)
    assert len(bars) > 2
    done, loss, dev, rate, _ = bars[-1]
    assert done == "12"
    assert float(loss) > 0
    assert dev.endswith("%")
    assert float(rate) > 0
    assert "step  6/12  dev accuracy" in seen
    assert not re.search(r"step +\d+/12  loss", seen)
    assert "dev before training" in seen
    assert "step  6/12  loss" in (tmp_path / "run" / "train.log").read_text()


def test_a_pipe_has_plain_lines_that_are_never_folded() -> None:
    file = io.StringIO()
    console = Console(file=file, width=1000)
    with terminal.telling(console), terminal.meter(console, 40, 0) as meter:
        for step in range(1, 41):
            meter.step(step, 0.5)
        meter.dev(40, 0.75, "accuracy  75.0%" + " x" * 100)
    lines = file.getvalue().splitlines()
    assert len(lines) == 21
    assert re.fullmatch(r"step  2/40  loss 0\.5000  \S+ steps/s  \S+ s left", lines[0])
    assert lines[-1] == "step 40/40  dev accuracy  75.0%" + " x" * 100
    assert "\x1b" not in file.getvalue()


def test_a_slow_run_speaks_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: clock[0])
    file = io.StringIO()
    console = Console(file=file, width=1000)
    with terminal.telling(console), terminal.meter(console, 100_000, 500) as meter:
        for step in range(501, 511):
            clock[0] += 15.0
            meter.step(step, 0.5)
    lines = file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["503/100000", "506/100000", "509/100000"]
    assert lines[0].endswith("0.07 steps/s  414 h 34 min left")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "0 s"), (12.4, "12 s"), (99, "99 s"), (100, "2 min"), (3599, "60 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, told: str) -> None:
    assert terminal.duration(seconds) == told
