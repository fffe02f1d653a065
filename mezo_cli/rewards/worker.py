"""Call rewards: in a process of their own, which this file is the program of, or for a callable in mezo itself.

Every reward is a function that returns n numbers, or n dicts with the key `reward`. It is called by the names of its
parameters, `NAMES` and columns of the rows, with a list of n for each; `**kwargs` gets all of them.

The program reads a request per line from stdin, as JSON, and answers on stdout with the request's id, which a line that
the user's code writes there does not have:

    -> {"id": "5f...", "limit": 60, "method": "load", "arguments": [[[target, settings, sha256], ...], sys.path]}
    -> {"id": "a0...", "limit": 10, "method": "score", "arguments": [{"completions": [...], ...}, columns]}
    <- {"id": "a0...", "result": ...} or {"id": "a0...", "error": "..."}

It ends with its group of processes when stdin is closed, also in the middle of a call: mezo has gone then. What rewards
print goes to stderr. Only the standard library is imported here: the program gets mezo's `sys.path` by `load`.
"""

import contextlib
import faulthandler
import hashlib
import importlib.util
import inspect
import json
import math
import os
import queue
import reprlib
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

REWARD = "reward"  # the key of a dict that is optimized
RESERVED = ("std", "min", "max", "errors")  # reward_std and the like are mezo's own figures of a step
START_LIMIT = 60.0  # seconds for the start and the imports of rewards

NAMES = ("completions", "rows", "prompts", "golds", "seed")  # of parameters, beside the columns of the rows
BY_NAME = f"parameters go by name: {', '.join(NAMES)}, a column of the rows, or **kwargs for all"

Scores = dict[str, float] | str  # of one row: numbers by name, REWARD among them; or what is wrong with them
Batch = Mapping[str, Sequence[Any]]  # each of NAMES, [n]


class RewardError(Exception):
    """A reward cannot be loaded, or fails on a batch. The text is one line."""


# --- functions ---


class Function:
    """A reward that is called by the names of its parameters; `needed` are columns that it has no default for."""

    def __init__(self, function: Any) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise RewardError(f"is not a function, or one whose parameters cannot be read; {BY_NAME}") from error
        self._function, parameters = function, [*signature.parameters.values()]
        for one in parameters:
            if one.kind in (one.VAR_POSITIONAL, one.POSITIONAL_ONLY):
                raise RewardError(f"takes {signature}, '{one.name}' by position alone; {BY_NAME}")
        self._named = {one.name: one.default is one.empty for one in parameters if one.kind is not one.VAR_KEYWORD}
        self._takes_all = len(self._named) < len(parameters)
        self.needed = [name for name, is_needed in self._named.items() if is_needed and name not in NAMES]

    def __call__(self, batch: Batch, columns: Sequence[str]) -> Any:
        """Call it. `columns` are those of the data, for `**kwargs` and defaults; a row that lacks one gives None."""
        wanted = [name for name in (*NAMES, *columns) if self._takes_all or name in self._named]
        of_rows = {name: [row.get(name) for row in batch["rows"]] for name in wanted if name not in NAMES}
        return self._function(**of_rows, **{name: batch[name] for name in wanted if name in NAMES})


def load(target: str, settings: Mapping[str, Any] | None, sha256: str | None) -> Function:
    """Import what a reward stands for, `FILE.py:function` or `package.module:attribute`, or raise RewardError.

    Settings make an instance of it, a class; None: it is the function itself. A file has to have the sha256, if any.
    """
    place, _, attribute = target.rpartition(":")
    try:
        module = _run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise RewardError(f"cannot be imported: {_describe(error)}") from error
    file = module.__file__ or ""
    if sha256 is not None and hashlib.sha256(Path(file).read_bytes()).hexdigest() != sha256:
        raise RewardError(f"{file} has changed since the start of this run")
    function = getattr(module, attribute, None)
    if function is None:
        raise RewardError(f"{file} has no function '{attribute}'")
    return Function(function if settings is None else function(**settings))


def score(functions: Sequence[Function], batch: Batch, columns: Sequence[str]) -> list[list[Scores]]:
    """Return the scores of each function for each row of a batch; `columns` are those of the data."""
    scores, n = list[list[Scores]](), len(batch["rows"])
    for function in functions:
        try:
            values = function(batch, columns)
        except (Exception, SystemExit) as error:
            raise RewardError(f"raised {_describe(error)}") from error
        expected = f"for {n} completions: expected a list with one number or dict for each"
        if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__"):
            raise RewardError(f"returned a {type(values).__name__} {expected}")
        if len(values) != n:
            raise RewardError(f"returned {len(values)} values {expected}")
        scores.append([_numbers(entry) for entry in values])
    return scores


def _numbers(entry: Any) -> Scores:
    """Return what a function gave for one row as numbers by name, or what is wrong with it."""
    values = entry if isinstance(entry, Mapping) else {REWARD: entry}
    if REWARD not in values:
        return f"returned a dict without '{REWARD}': {sorted(map(str, values))}"
    if reserved := [name for name in RESERVED if name in values]:
        return f"returned a part named '{reserved[0]}': the names {', '.join(RESERVED)} are mezo's own"
    numbers = {}
    for name, value in values.items():
        if any("\ud800" <= char <= "\udfff" for char in str(name)):
            return f"returned a part named {name!r}, which contains an unpaired surrogate"
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            numbers[str(name)] = math.nan if isinstance(value, str) else float(value)
        if not math.isfinite(numbers.get(str(name), math.nan)):
            try:
                shown = reprlib.repr(value)[:80]
            except (ValueError, RecursionError):  # a number of 5,000 digits; a deeply nested list
                shown = f"a value of type {type(value).__name__}"
            return f"returned {shown} as {name}: expected a finite number"
    return numbers


def _describe(error: BaseException) -> str:
    """Return an error as one line, with the file and line where the user's code raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    text = text.encode(errors="backslashreplace").decode()  # an unpaired surrogate
    not_users = (os.path.dirname(__file__), "<frozen")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(not_users)]
    lines = [one.lineno for one in frames if one.filename == frames[0].filename]  # not those of a library that it calls
    return text[:500] + (f" ({frames[0].filename}:{lines[-1]})" if frames else "")


def _run_file(file: Path) -> ModuleType:
    """Run a file as a module that can import its neighbours. Compiled here, it never comes from an old __pycache__."""
    sys.path.insert(0, str(file.parent))
    spec: Any = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # which dataclasses and pickle look up
    exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    return module


# --- the process, seen from mezo ---


class Worker:
    """The process in which rewards are called, of the arguments of `load` for each. `close` has to end it."""

    def __init__(self, parts: list[Any], timeout: float) -> None:
        self._parts, self._timeout = parts, timeout
        self._process: Any = None
        self.needed: list[str] = []  # of the rewards, once it runs

    def start(self) -> None:
        """Start the process and let it load the rewards; nothing if it runs already."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Sets of texts have one order in every process, so that a resumed run can give the same rewards.
            env={"PYTHONHASHSEED": "0", **os.environ},
            start_new_session=True,  # Ctrl-C is mezo's alone; the group is killed as one
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # from its stdout; b"" when that is closed
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        try:
            path = [os.path.abspath(entry) for entry in sys.path]
            self.needed = self._call("load", (self._parts, path), START_LIMIT, "the limit of its start")
        except RewardError:
            self.close()
            raise

    def score(self, batch: Batch, columns: Sequence[str]) -> list[list[Scores]]:
        """Return what `score` returns for a batch. After a RewardError the process may have to be started again."""
        return list(self._call("score", (batch, columns), self._timeout, "objective.reward_timeout"))

    def _call(self, method: str, arguments: Any, limit: float, limit_name: str) -> Any:
        process, answer = self._process, None
        message = {"id": os.urandom(8).hex(), "limit": limit, "method": method, "arguments": arguments}
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(message, default=_plain).encode() + b"\n")
                process.stdin.flush()
            line = self._lines.get(timeout=limit)
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(line)
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                self.close()
                status = process.returncode
                how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                raise RewardError(f"ended its process by {how}")
            if not isinstance(answer, dict) or answer.get("id") != message["id"]:
                raise RewardError(f"wrote {line[:80].strip()!r} to the pipe by which its process answers")
        except queue.Empty as error:
            self.close()
            raise RewardError(f"took longer than {limit:g} s ({limit_name})") from error
        except BaseException:  # Ctrl-C too: its answer would be read as that of the next call
            self.close()
            raise
        if "error" in answer:
            raise RewardError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Kill the process and those that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()


def _read(pipe: BinaryIO, lines: "queue.SimpleQueue[bytes]") -> None:
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(b"")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # what JSON does not have: arrays, dates


# --- the program of the process ---


def main() -> None:
    """Serve requests until stdin is closed."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")  # which no child process inherits
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        _read(requests, lines)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    functions: list[Function] = []
    while line := lines.get():
        message = json.loads(line)
        # If mezo is killed while a call keeps the interpreter's lock, no thread sees that stdin is closed.
        faulthandler.dump_traceback_later(message["limit"] + 5, exit=True, file=null)
        answer = _answer(functions, message["method"], message["arguments"])
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        answers.write(json.dumps({"id": message["id"], **answer}).encode() + b"\n")
        answers.flush()


def _answer(functions: list[Function], method: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        if method == "score":
            return {"result": score(functions, *arguments)}
        parts, sys.path[:] = arguments
        functions += [load(*part) for part in parts]
        return {"result": [name for one in functions for name in one.needed]}
    except RewardError as error:
        return {"error": str(error)}
    except BaseException as error:  # of the user's code, KeyboardInterrupt and GeneratorExit too
        return {"error": f"raised {_describe(error)}"}


if __name__ == "__main__":
    main()
