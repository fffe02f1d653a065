"""Share the GPUs of a machine between the jobs of a sweep, each in a process of its own: `SWEEP/.gpus`.

A slot is some of the GPUs and a lock file (flock). The process that holds the lock uses them until it ends.
"""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError
from mezo_cli.runs.files import check_no_link
from mezo_cli.runs.lock import lock_file

FOLDER = ".gpus"
POLL_SECONDS = 0.5

_held: dict[Path, tuple[Any, str]] = {}  # folder -> the lock of this process and its GPUs


def slots(gpus: Sequence[str], per_job: int) -> list[str]:
    """Return the values of CUDA_VISIBLE_DEVICES for jobs of `per_job` GPUs each; GPUs that are left over are unused."""
    return [",".join(gpus[i : i + per_job]) for i in range(0, len(gpus) - per_job + 1, per_job)]


def claim(folder: Path, values: Sequence[str]) -> str:
    """Claim one of the slots for this process until it ends; wait while all are taken.

    Args:
        folder: of the sweep.
        values: of `slots`.

    Returns:
        The value of CUDA_VISIBLE_DEVICES; the same one whenever this process asks for the same folder.

    Raises:
        UserError: when the lock files cannot be written, or the file system has no locks.
    """
    if folder in _held:
        return _held[folder][1]
    locks = folder / FOLDER
    try:
        check_no_link(locks)
        locks.mkdir(exist_ok=True)
        while True:
            for number, value in enumerate(values):
                with contextlib.suppress(BlockingIOError):
                    _held[folder] = lock_file(locks / f"{number}.lock"), value  # as long as the process lives
                    return value
            time.sleep(POLL_SECONDS)
    except OSError as error:
        raise UserError(f"{locks}: GPUs cannot be shared between jobs: {error.strerror}") from error
