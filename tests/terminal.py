"""Run the command line on a pseudo-terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.command_line import environment


def on_a_terminal(words: list[str], cwd: Path, columns: int = 100, **extra: str) -> tuple[int, str]:
    """Run `mezo words...` on a pseudo-terminal; return its status and what was written, without control sequences."""
    code, seen = raw_on_a_terminal(words, cwd, columns, **extra)
    return code, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)


def raw_on_a_terminal(words: list[str], cwd: Path, columns: int = 100, **extra: str) -> tuple[int, str]:
    """Return the same with control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    command = [sys.executable, "-m", "mezo_cli", *words]
    env = environment(**{"TERM": "xterm-256color", **extra})
    for name in {"CI", "NO_COLOR", "COLUMNS"} - set(extra):
        env.pop(name, None)
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
    return process.wait(), seen.decode()
