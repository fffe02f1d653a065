"""Open, lock and write files: whole or not at all, and safe from a power cut.

A file's bytes are safe after its fsync, its name after the fsync of its folder. Temporary names in a run directory are
fixed: only the process that holds its lock writes there. What an option names (`--out`) is written by output.py.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

from filelock import FileLock, Timeout

from mezo_cli.errors import FULL, RunFailed, UserError

TEMPORARY = ".{}.tmp"  # of the name of the file that it becomes


@overload
def open_own(path: Path, mode: Literal["rb"] = "rb") -> io.BufferedReader: ...
@overload
def open_own(path: Path, mode: Literal["ab", "wb", "xb", "r+b"]) -> BinaryIO: ...
def open_own(path: Path, mode: str = "rb") -> Any:
    """Open a regular file; to write, never through a link. (The hub's cache, which is read, consists of links.)"""
    own = os.O_NONBLOCK | (0 if mode == "rb" else os.O_NOFOLLOW)  # a pipe without a writer would wait

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | own, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise UserError(f"{name} is damaged: it is not a regular file")

    return open(path, mode, opener=opener)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file."""
    with open_own(path) as file:
        return file.read()


def lock_file(path: Path, seconds: float = 0.0) -> FileLock:
    """Lock a file, which is created, until `release` or the end of the process.

    Args:
        path: the file.
        seconds: how long to wait for it.

    Raises:
        BlockingIOError: when another process holds the lock.
    """
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=seconds, poll_interval=0.002)
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from error
    return lock


def remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to), or a folder with its content; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file in one step: readers see the old content or the new, also after a power cut. Text is UTF-8."""
    temporary = path.with_name(TEMPORARY.format(path.name))
    try:
        with name_in_errors(path):
            remove(temporary)
            with open_own(temporary, "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_new_folder(new: Path, write: Callable[[Path], None]) -> None:
    """Make a folder in place of what has its name, let `write` fill it, and sync it with all its files."""
    remove(new)
    new.mkdir()
    write(new)
    for folder, _, names in os.walk(new):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def write_error(path: Path | str, error: Exception) -> UserError | RunFailed:
    """Return the error to report when `path` could not be written: a full disk is not the user's mistake."""
    if isinstance(error, FileExistsError):  # what mkdir raises where a parent is a file
        error = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    by_user = isinstance(error, OSError) and error.errno not in (*FULL, errno.EIO)
    return (UserError if by_user else RunFailed)(f"{path}: cannot be written: {reason}")


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Name the file in an OSError of the block that names none: those of writing, closing and syncing do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk.

    Raises:
        OSError: when the disk is full or fails. A file system that cannot sync is not an error.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with name_in_errors(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise


def is_below(path: Path, folder: Path) -> bool:
    """Return whether a path lies in a folder, as it is written and with its links followed; neither needs to exist."""
    written = [Path(os.path.abspath(each)) for each in (path, folder)]
    return all(folder in path.parents for path, folder in (written, [each.resolve() for each in written]))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open_own(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse_int(digits: str) -> int:
    """Return a whole number; refuse one that no float holds, which no run writes."""
    if len(digits) > 300:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    try:
        value = json.loads(read_bytes(path), parse_int=_parse_int)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value
