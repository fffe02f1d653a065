"""Run a logger in a process of its own: the side of the process that trains. logger_program.py is the other side.

The package of such a logger prints, prompts, starts threads, waits for a network or crashes: training goes on. The
process is in a session of its own, which Ctrl-C does not reach. It ends with the process that trains, because its
standard input ends then.
"""

import contextlib
import dataclasses
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mezo_cli.runs.files import open_to_write
from mezo_cli.training.loggers.base import LoggedRun, RunEnd

log = logging.getLogger("mezo")

PROGRAM = "mezo_cli.training.loggers.logger_program"
CLOSE_SECONDS = {"finished": 120.0, "failed": 30.0, "interrupted": 10.0}  # to write and send what is left


class ProcessLogger:
    """A logger in a process of its own. It starts while training goes on.

    Messages go to it as lines of JSON. It answers with its `note` when it has started, with an `error` when it fails,
    and with `closed` at the end.
    """

    package: ClassVar[str] = ""
    own_process: ClassVar[bool] = False
    note = ""

    def __init__(self, name: str, run: LoggedRun) -> None:
        self._name, self._run, self._unread = name, run, b""
        self._errors = Path(run.folder) / "process.log"
        package_root = str(Path(__file__).resolve().parents[3])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with open_to_write(self._errors, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},  # not what is here
                start_new_session=True,
            )
        with self._killed_on_error():
            self._send(dataclasses.asdict(run))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the scalars, except those that the logger had before the run was resumed.

        Raises:
            RuntimeError: when the logger has failed, or its process has ended.
        """
        with self._killed_on_error():
            self._read_answers(0.0)
            if not self._run.was_logged(step, scalars):
                self._send({"step": step, "scalars": dict(scalars)})

    def close(self, end: RunEnd) -> None:
        """Send how the run ended, and wait until the logger has written all.

        Raises:
            TimeoutError: when it takes too long; it is killed then.
        """
        seconds = CLOSE_SECONDS[end.status]
        deadline = time.monotonic() + seconds
        with self._killed_on_error():
            self._send({"end": dataclasses.asdict(end)})
            while not self._read_answers(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"it did not finish within {seconds:.0f} s; see {self._errors}")
            self._process.wait(max(1.0, deadline - time.monotonic()))
            self._close_pipes()

    def _send(self, message: Mapping[str, Any]) -> None:
        pipe: Any = self._process.stdin
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            self._read_answers(1.0)  # it may have said why
            raise

    def _read_answers(self, seconds: float) -> bool:
        """Read the answers that have come; wait up to `seconds` for one. Return whether the logger is closed.

        Raises:
            RuntimeError: when the logger has failed, or its process has ended.
        """
        pipe: Any = self._process.stdout
        while select.select([pipe], [], [], seconds)[0]:
            data = os.read(pipe.fileno(), 65536)
            if not data:
                raise RuntimeError(f"its process ended with status {self._process.wait()}; see {self._errors}")
            *lines, self._unread = (self._unread + data).split(b"\n")
            for answer in map(json.loads, lines):
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                if answer.get("note"):
                    log.info("%-6s %s", self._name, answer["note"])
                if "closed" in answer:
                    return True
            seconds = 0.0
        return False

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        """Kill the process when the block raises, be it a KeyboardInterrupt."""
        try:
            yield
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._close_pipes()
            raise

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes
