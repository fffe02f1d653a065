"""A lock that one process holds on a run directory while it trains there."""

import fcntl
import time
from pathlib import Path
from typing import BinaryIO

from mezo_cli.runs.files import open_to_read, open_to_write

RETRY_SECONDS = 5.0  # how long a lock is retried that only readers hold; each holds it for microseconds


class RunLock:
    """An advisory lock (flock) on a file of its own. The operating system releases it when the process ends.

    A reader that asks whether it is held takes it shared for a moment, so a writer that finds it taken tries again as
    long as no other writer holds it. On a file system without locks it can always be acquired, and whether it is held
    cannot be known.

    Args:
        path: the file; it is created when the lock is first acquired.
        earlier: the file that earlier versions locked; a process of theirs may hold it.
    """

    def __init__(self, path: Path, earlier: Path) -> None:
        self.path, self._earlier = path, earlier
        self._file: BinaryIO | None = None

    def acquire(self) -> bool:
        """Lock the file, creating it if needed; return False if another process holds the lock."""
        if _is_held(self._earlier):
            return False
        file = open_to_write(self.path, "ab")  # closed by release
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if _is_held(self.path) or time.monotonic() > deadline:
                    file.close()
                    return False
                time.sleep(0.001)
            except OSError:  # a file system without locks
                break
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock if this object holds it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def is_held(self) -> bool | None:
        """Return whether a process holds the lock for writing; None if that cannot be known."""
        held = _is_held(self.path)
        return _is_held(self._earlier) if held is False else held


def _is_held(path: Path) -> bool | None:
    try:
        with open_to_read(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError) as error:
        return isinstance(error, BlockingIOError)
    except OSError:
        return None
    return False
