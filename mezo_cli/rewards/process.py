"""Start the worker (worker.py), call it within a time limit, and kill it with whatever it has started."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mezo_cli
from mezo_cli.rewards.functions import RewardError

PROGRAM = "mezo_cli.rewards.worker"
START_LIMIT = 60.0  # seconds for the start and the imports of rewards


class Worker:
    """The process in which rewards are called. `close` has to end it.

    Args:
        parts: the arguments of `functions.load` for each reward.
        timeout: seconds for a call.
    """

    def __init__(self, parts: list[Any], timeout: float) -> None:
        self._parts, self._timeout = parts, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._received, self._requests = b"", 0

    def score(self, *batch: Any) -> Any:
        """Return what `functions.score` returns for a batch. The process has been started.

        Raises:
            RewardError: when it reports an error, takes longer than the timeout, or ends; then it can be started again.
        """
        return self._call({"method": "score", "batch": batch}, self._timeout, "objective.reward_timeout")

    def start(self) -> None:
        """Start the process and let it load the rewards; nothing if it runs already.

        Raises:
            RewardError: when a reward cannot be loaded, or the limit of the start is reached.
        """
        if self._process is not None:
            return
        root = str(Path(mezo_cli.__file__).resolve().parents[1])
        self._received = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Sets of texts have one order in every process, so that a resumed run can give the same rewards.
            env={**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
            start_new_session=True,  # Ctrl-C is mezo's alone; the group is killed as one
        )
        path, pythonpath = [os.path.abspath(entry) for entry in sys.path], os.environ.get("PYTHONPATH")
        message = {"method": "load", "parts": self._parts, "path": path, "pythonpath": pythonpath}
        try:
            self._call(message, START_LIMIT, "the limit of its start")
        except BaseException:
            self.close()
            raise

    def _call(self, message: dict[str, Any], limit: float, limit_name: str) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        self._requests += 1
        message |= {"id": self._requests, "limit": limit}
        try:
            self._process.stdin.write(json.dumps(message, default=_plain).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._receive(time.monotonic() + limit)
        except TimeoutError as error:
            self.close()
            raise RewardError(f"took longer than {limit:g} s ({limit_name})") from error
        except (OSError, EOFError) as error:
            raise RewardError(self._describe_end()) from error
        except BaseException:  # Ctrl-C, or no answer to this: the next one would be read as that of the next call
            self.close()
            raise
        if "error" in answer:
            raise RewardError(answer["error"])
        return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Return the answer to the last request.

        Raises:
            RewardError: when a reward has written something else to the pipe of the answers.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        number, poll = self._process.stdout.fileno(), select.poll()
        poll.register(number, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(number, 1 << 20)
            if not part:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            answer: dict[str, Any] = json.loads(line)
            if isinstance(answer, dict) and answer.get("id") == self._requests:
                return answer
        raise RewardError(f"wrote {line[:80]!r} to the pipe by which its process answers")

    def _describe_end(self) -> str:
        assert self._process is not None
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        self.close()
        status = process.returncode
        return f"ended its process by {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"

    def close(self) -> None:
        """Kill the process and those that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _plain(value: Any) -> Any:
    """Return a value of a row that JSON does not have: arrays as lists, others (a date) as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
