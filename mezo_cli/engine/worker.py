"""The program that runs in an engine's environment: read requests from a socket, answer them until it is closed.

It dies with its parent: the kernel kills it then, and a closed socket ends it too.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

from mezo_cli.engine import protocol
from mezo_cli.engine.environment import COMMAND

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main() -> None:
    """Serve the socket whose number is the first argument; the second is the parent's process id."""
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    die_with_parent(int(sys.argv[2]))
    serve(stream, _make_model)
    os._exit(0)  # the engine's own clean-up may wait for processes that have gone


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Elsewhere than on Linux the closed socket ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def serve(stream: BufferedRWPair, make_model: Callable[..., Any]) -> None:
    """Answer requests until the stream ends.

    `hello` and `start` are answered here: `start`'s params make the model. Every other method is one of the model's.
    """
    model: Any = None
    while (message := protocol.receive(stream)) is not None:
        method, params = message["method"], message.get("params", {})
        try:
            if method == "hello":
                result: Any = None
            elif method == "start":
                model = make_model(**params)
                result = model.describe()
            else:
                result = getattr(model, method)(**params)
            answer = {"result": result}
        except Exception as error:  # an engine raises anything; the parent reports it
            text = protocol.one_line(str(error))
            answer = {"error": f"{type(error).__name__}: {text}" if text else type(error).__name__}
        protocol.send(stream, answer)


def _make_model(**params: Any) -> Any:
    try:
        from mezo_cli.engine.vllm_model import VllmModel

        return VllmModel(**params)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error} in {sys.executable}; '{COMMAND}' makes an environment") from error


if __name__ == "__main__":
    main()
