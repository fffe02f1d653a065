"""The protocol between mezo and the process of an engine: one JSON document per line, over a socket.

    -> {"method": "score", "params": {...}}
    <- {"result": ...}   or   {"error": "one line"}

Both sides run the same files of this package. The first request is `hello`. Requests are answered in order. Only
numbers, texts and lists cross the socket: weights are files or are drawn in the engine. This module needs the standard
library alone, as the engine's environment has none of mezo's dependencies.
"""

import json
from io import BufferedRWPair
from typing import Any


def send(stream: BufferedRWPair, message: dict[str, Any]) -> None:
    """Write one message.

    Raises:
        OSError: when the other side has gone.
    """
    stream.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    stream.flush()


def receive(stream: BufferedRWPair) -> dict[str, Any] | None:
    """Return the next message; None when the other side has closed the socket, or died in the middle of a line.

    Raises:
        ValueError: for a line that is not a JSON object.
    """
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message of the protocol is a JSON object")
    return message


def one_line(text: str, limit: int = 500) -> str:
    """Return a text as one line, cut to a number of characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
