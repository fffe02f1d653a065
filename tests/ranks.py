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
TIMEOUT = HANGS


def run_ranks(
    *words_of: Sequence[object], prepare: Callable[[int], None] | None = None, **environment: str
) -> list[Result]:
    """Run `mezo words...` on as many ranks as there are lists of words; return how each ended.

    `prepare` is called in each rank first, with its number. It is a function of a module.
    """
    port = free_port()
    ranks = []
    for rank, words in enumerate(words_of):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        variables = {"RANK": rank, "WORLD_SIZE": len(words_of), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {**{name: str(value) for name, value in variables.items()}, "MEZO_EAGER": "1", **environment}
        process = _CONTEXT.Process(target=_run, args=(theirs, [str(word) for word in words], own, prepare))
        process.start()
        theirs.close()
        ranks.append((process, mine))
    return [_result(process, mine) for process, mine in ranks]


def call_in_ranks(number: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what a function of a module returns in each of several processes with the variables of `torchrun`."""
    port, results = free_port(), []
    for rank in range(number):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MEZO_EAGER": 1}
        own = {name: str(value) for name, value in variables.items()}
        process = _CONTEXT.Process(target=_call, args=(theirs, own, function, args))
        process.start()
        theirs.close()
        results.append((process, mine))
    return [_returned(process, mine) for process, mine in results]


def _call(result: Connection, environment: dict[str, str], function: Callable[..., Any], args: Sequence[Any]) -> None:
    os.environ.update(environment)
    result.send(function(*args))


def _returned(process: Any, result: Connection) -> Any:
    """Return what the function returned; EOFError if it raised."""
    value = result.recv()
    process.join(TIMEOUT)
    return value


def free_port() -> int:
    """Return a port of this host that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _run(
    result: Connection, words: list[str], environment: dict[str, str], prepare: Callable[[int], None] | None
) -> None:
    os.environ.update(environment)
    if prepare is not None:
        prepare(int(environment["RANK"]))
    result.send(mezo(*words))


def _result(process: Any, result: Connection) -> Result:
    """Return how a rank ended; one that was killed has no output."""
    found: Result | None = None
    if result.poll(TIMEOUT):
        with contextlib.suppress(EOFError):
            found = result.recv()
    process.join(TIMEOUT)
    return found or Result(process.exitcode, "", "")
