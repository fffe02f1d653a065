"""The program that calls rewards: read requests from stdin, one JSON document per line, and answer them on stdout.

    -> {"method": "load", "parts": [...], "path": [...], "pythonpath": null}    <- {"result": null}
    -> {"method": "score", "batch": [completions, rows, golds, seeds]}          <- {"result": ...} or {"error": "..."}

Both have an `id` and a request the `limit` of its seconds; an answer has the `id` of its request.

It ends with its group of processes when stdin is closed, also in the middle of a call: mezo has gone then. What rewards
print goes to stderr. Nothing outside the standard library is imported before mezo's own `sys.path` is here.
"""

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO


def main() -> None:
    """Serve requests until stdin is closed."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")  # which no child process inherits
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    parts: list[Any] = []
    while True:
        message = json.loads(lines.get())
        number, limit = message.pop("id"), message.pop("limit")
        # If mezo is killed while a call keeps the interpreter's lock, no thread sees that stdin is closed.
        faulthandler.dump_traceback_later(limit + 5, exit=True, file=null)
        answer = _answer(message, parts)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        answers.write(json.dumps({"id": number, **answer}).encode() + b"\n")
        answers.flush()


def _read(requests: BinaryIO, lines: "queue.SimpleQueue[bytes]") -> None:
    """Queue the lines of stdin; at its end, kill the whole group."""
    for line in requests:
        lines.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _answer(message: dict[str, Any], parts: list[Any]) -> dict[str, Any]:
    """Carry out one request. `load` fills the list of parts."""
    method = message.pop("method")
    if method == "load":
        sys.path[:] = message["path"]
        os.environ.pop("PYTHONPATH")  # set to find this program; children of a reward get the user's own
        if message["pythonpath"] is not None:
            os.environ["PYTHONPATH"] = message["pythonpath"]
    from mezo_cli.rewards import functions

    try:
        if method == "load":
            parts += [functions.load(*part) for part in message["parts"]]
            return {"result": None}
        return {"result": functions.score(parts, *message["batch"])}
    except functions.RewardError as error:
        return {"error": str(error)}
    except BaseException as error:  # of the user's code, KeyboardInterrupt and GeneratorExit too
        return {"error": f"raised {functions.describe(error)}"}


if __name__ == "__main__":
    main()
