"""A lock that one process holds on a file, such as a run directory's `.lock` while it trains there."""

import sqlite3
import time
from pathlib import Path
from typing import BinaryIO

from mezo_cli.runs.files import open_to_read, open_to_write

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RETRY_SECONDS = 5.0  # how long a lock is retried that only readers hold; each holds it for microseconds


class RunLock:
    """An advisory lock on a file of its own. The operating system releases it when the process ends.

    A reader that asks whether it is held takes it shared for a moment, so a writer that finds it taken tries again as
    long as no other writer holds it. On a file system without locks it can always be acquired, and whether it is held
    cannot be known.

    Args:
        path: the file; it is created when the lock is first acquired.
        earlier: the file that earlier versions locked; a process of theirs may hold it.
    """

    def __init__(self, path: Path, earlier: Path) -> None:
        self.path, self._earlier = path, earlier
        self._locked: BinaryIO | sqlite3.Connection | None = None

    def acquire(self) -> bool:
        """Lock the file, creating it if needed; return False if another process holds the lock."""
        if _is_held(self._earlier):
            return False
        open_to_write(self.path, "ab").close()
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                self._locked = lock_file(self.path)
                return True
            except BlockingIOError:
                if _is_held(self.path) or time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            except OSError:  # a file system without locks
                return True

    def release(self) -> None:
        """Release the lock if this object holds it."""
        if self._locked is not None:
            self._locked.close()
            self._locked = None

    def is_held(self) -> bool | None:
        """Return whether a process holds the lock for writing; None if that cannot be known."""
        is_held = _is_held(self.path)
        return _is_held(self._earlier) if is_held is False and fcntl is not None else is_held


def lock_file(path: Path, shared: bool = False) -> BinaryIO | sqlite3.Connection:
    """Lock a file until what is returned is closed.

    By flock. Where Python has none (Windows), the file is an empty SQLite database in an exclusive transaction: SQLite
    has the locks of every system.

    Args:
        path: the file. It is created, unless the lock is shared.
        shared: let others have it shared, too.

    Raises:
        BlockingIOError: when another process holds it.
        OSError: when the file cannot be opened, or the file system has no locks.
    """
    file = open_to_read(path) if shared else open_to_write(path, "ab")
    if fcntl is None:
        file.close()
        return _lock_database(path, shared)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def _lock_database(path: Path, shared: bool) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?mode={'ro' if shared else 'rw'}"
    try:
        database = sqlite3.connect(address, timeout=0, isolation_level=None, check_same_thread=False, uri=True)
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from error
    try:
        database.execute("SELECT 1 FROM sqlite_master" if shared else "BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        database.close()
        raise (BlockingIOError if "locked" in str(error) else OSError)(f"{path}: {error}") from error
    return database


def _is_held(path: Path) -> bool | None:
    try:
        lock_file(path, shared=True).close()
    except (BlockingIOError, FileNotFoundError) as error:
        return isinstance(error, BlockingIOError)
    except OSError:
        return None
    return False
