"""The program of a logger that has a process of its own: `python -m mezo_cli.training.loggers.logger_program NAME`.

It reads lines of JSON: the run, then scalars, then how the run ended. See process.py.
"""

import contextlib
import json
import os
import queue
import sys
import threading
from typing import IO, Any

from mezo_cli.errors import one_line, without_credentials
from mezo_cli.training.loggers import LOGGERS
from mezo_cli.training.loggers.base import LoggedRun, Logger, RunEnd

ORPHAN_SECONDS = 30.0  # that this process lives on when the process that trains was killed


def main(name: str) -> None:
    """Run a logger until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the package prints goes to the same file as its errors
    printed: Any = WithoutCredentials(sys.stderr)
    sys.stdout = sys.stderr = printed
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, messages), daemon=True).start()
    step = 0
    try:
        logger: Logger = LOGGERS.load(name)(LoggedRun(**messages.get()))
        _answer(answers, note=logger.note)
        while True:
            message = messages.get()
            if message is None:
                logger.close(RunEnd("failed", step, "the process that trained was killed"))
                return
            if "end" in message:
                logger.close(RunEnd(**message["end"]))
                _answer(answers, closed=True)
                return
            step = message["step"]
            logger.log(step, message["scalars"])
    except Exception as error:
        _answer(answers, error=one_line(error))
        raise


class WithoutCredentials:
    """A stream to which no credentials are written: a package prints the address of its server (WANDB_BASE_URL)."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text without the credentials in it."""
        self._stream.write(without_credentials(text))
        return len(text)


def _read(lines: IO[str], messages: "queue.SimpleQueue[Any]") -> None:
    """Put every message into the queue at once, so that the process that trains never waits for the package."""
    for line in lines:
        messages.put(json.loads(line))
    messages.put(None)
    timer = threading.Timer(ORPHAN_SECONDS, os._exit, [1])  # it may wait for a network for ever
    timer.daemon = True
    timer.start()


def _answer(answers: IO[str], **values: Any) -> None:
    """Send an answer; the process that trains may be gone."""
    with contextlib.suppress(BrokenPipeError):
        answers.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
