"""The fields of run.json."""

import datetime
import hashlib
import os
import socket
from typing import Any

from mezo_cli import system
from mezo_cli.errors import without_credentials

FORMAT = 1  # of the run directory; begins with version 1.0.0 of the package
STATUSES = ("running", "finished", "failed", "interrupted", "pruned")  # pruned: ended by `mezo tune`


def initial_run_json(config_yaml: str, argv: list[str]) -> dict[str, Any]:
    """Return the content of run.json of a run that this process creates now. It runs once `Run.tracked` says so."""
    return {
        "format": FORMAT,
        "status": "interrupted",
        "argv": [without_credentials(word) for word in argv],
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "start": utc_now(),
        "end": None,
        "error": None,
        "versions": system.versions(),
        "git_commit": system.git_commit(),
        "git_dirty": system.git_dirty(),
        "config_sha256": hashlib.sha256(config_yaml.encode()).hexdigest(),
    }


def may_be_alive(info: dict[str, Any]) -> bool:
    """Return whether the process that run.json names may exist; on another host that cannot be known."""
    if info.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(info.get("pid")), 0)  # type: ignore[arg-type]  # (a missing pid is a TypeError)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def utc_now() -> str:
    """Return the time as an ISO 8601 string, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
