"""Run the process of an engine in its own environment, and call it."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import mezo_cli
from mezo_cli.engine import protocol

PROGRAM = "mezo_cli.engine.worker"
WAIT = 5.0  # seconds for a process to end by itself


class EngineFailed(Exception):  # noqa: N818 (it names what happened)
    """The engine reported an error, or its process has ended. The text is one line."""


class EngineProcess:
    """The process of an engine. It sees the package `mezo_cli` of this process, and nothing else of its environment.

    Args:
        python: the interpreter of the engine's environment.
        timeout: seconds to wait for an answer.
        variables: further environment variables for it; None removes one.

    Raises:
        EngineFailed: when it does not start.
    """

    def __init__(
        self, python: Path, timeout: float | None = None, variables: Mapping[str, str | None] | None = None
    ) -> None:
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="mezo-engine-")
        self._log = Path(self._folder.name) / "engine.log"
        packages = Path(self._folder.name) / "packages"
        packages.mkdir()
        (packages / "mezo_cli").symlink_to(Path(mezo_cli.__file__).resolve().parent)
        here, there = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment |= {"PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        for name, value in (variables or {}).items():
            environment.pop(name, None)
            environment |= {} if value is None else {name: value}
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [str(python), "-m", PROGRAM, str(there.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[there.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C is mezo's alone; the group is killed as one
                )
        except OSError as error:
            here.close()
            self._folder.cleanup()
            raise EngineFailed(f"{python} cannot be run: {error.strerror}") from error
        finally:
            there.close()
        self._socket = here
        self._stream = here.makefile("rwb")
        self._sent = self._received = 0
        self._answers: dict[int, dict[str, Any]] = {}  # by the number of the request, until they are read
        self._arrived: queue.SimpleQueue[dict[str, Any] | str] = queue.SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)  # else both sides might wait for the other to read
        self._reader.start()
        try:
            self.call("hello")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the engine and return its result.

        Raises:
            EngineFailed: when the engine reports an error, has ended, or does not answer within the timeout.
        """
        return self.submit(method, **params)()

    def submit(self, method: str, **params: Any) -> Callable[[], Any]:
        """Send a call; return a function that waits for its result. The engine takes calls in their order.

        Raises:
            EngineFailed: as `call` does, here or when the result is waited for.
        """
        try:
            protocol.send(self._stream, {"method": method, "params": params})
        except (OSError, ValueError) as error:
            raise EngineFailed(self._describe_end(str(error))) from error
        self._sent += 1
        return partial(self._result, self._sent)

    def _read(self) -> None:
        """Put every answer into the queue, and at last, as a text, why there are no more."""
        answer: dict[str, Any] | str = {}
        while isinstance(answer, dict):
            try:
                answer = protocol.receive(self._stream) or "it closed the connection"
            except (OSError, ValueError) as error:
                answer = str(error)
            self._arrived.put(answer)

    def _result(self, number: int) -> Any:
        while number not in self._answers:
            try:
                answer = self._arrived.get(timeout=self._timeout)
            except queue.Empty:
                raise EngineFailed(f"it did not answer within engine.timeout={self._timeout:g} s") from None
            if isinstance(answer, str):
                raise EngineFailed(self._describe_end(answer))
            self._received += 1
            self._answers[self._received] = answer
        answer = self._answers.pop(number)
        if "error" in answer:
            raise EngineFailed(str(answer["error"]))
        return answer["result"]

    def _describe_end(self, otherwise: str) -> str:
        """Return how the process ended, and the last line that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT)
        status = self._process.returncode
        if status is None:
            how = otherwise
        elif status < 0:
            how = f"its process was ended by {signal.Signals(-status).name}"
        else:
            how = f"its process ended with status {status}"
        written = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return protocol.one_line(f"{how}: {written[-1]}" if written else how)

    def close(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # it ends when the socket is closed, and so does the reader
        self._reader.join()
        for end in (self._stream, self._socket):
            with contextlib.suppress(OSError):
                end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT)
        with contextlib.suppress(ProcessLookupError):  # what is left of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
