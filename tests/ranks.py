"""`mezo` as several ranks that share a run: real processes, started as `torchrun` starts them, by its variables.

They are forked from one process that has imported torch, so that a start takes no seconds.
"""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.command_line import HANGS, Result, mezo

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["tests.command_line", "mezo_cli.training.loop", "mezo_cli.config.compose", "torch.distributed", "transformers"]
)


def run_ranks(
    *words_of: Sequence[object], prepare: Callable[[int], None] | None = None, **environment: str
) -> list[Result]:
    """Run `mezo words...` on as many ranks as there are lists of words; return how each ended.

    `prepare` is called in each rank first, with its number. It is a function of a module.
    """
    started = _start(_run, [([str(word) for word in words], prepare) for words in words_of], environment)
    return [_result(process, mine) for process, mine in started]


def call_in_ranks(number: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what a function of a module returns in each of several processes with the variables of `torchrun`."""
    started = _start(_call, [(function, args)] * number, {}, is_local=True)
    return [_returned(process, mine) for process, mine in started]


def _start(
    target: Callable[..., None], args_of: Sequence[Any], environment: dict[str, str], is_local: bool = False
) -> list[Any]:
    """Start a process per rank; return each with the end of a pipe on which its result comes."""
    common = {"WORLD_SIZE": len(args_of), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "MEZO_EAGER": 1}
    started = []
    for rank, args in enumerate(args_of):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": len(args_of)} if is_local else {}
        variables = {name: str(value) for name, value in {"RANK": rank, **local, **common, **environment}.items()}
        process = _CONTEXT.Process(target=target, args=(theirs, variables, *args))
        process.start()
        theirs.close()
        started.append((process, mine))
    return started


def _call(result: Connection, environment: dict[str, str], function: Callable[..., Any], args: Sequence[Any]) -> None:
    os.environ.update(environment)
    result.send(function(*args))


def _returned(process: Any, result: Connection) -> Any:
    """Return what the function returned; EOFError if it raised."""
    value = result.recv()
    process.join(HANGS)
    return value


def free_port() -> int:
    """Return a port of this host that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _run(
    result: Connection, environment: dict[str, str], words: list[str], prepare: Callable[[int], None] | None
) -> None:
    os.environ.update(environment)
    if prepare is not None:
        prepare(int(environment["RANK"]))
    result.send(mezo(*words))


def _result(process: Any, result: Connection) -> Result:
    """Return how a rank ended; one that was killed has no output."""
    found: Result | None = None
    if result.poll(HANGS):
        with contextlib.suppress(EOFError):
            found = result.recv()
    process.join(HANGS)
    return found or Result(process.exitcode, "", "")
