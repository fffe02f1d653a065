"""Open, lock and write files: whole or not at all, and safe from a power cut.

A file's bytes are safe after its fsync, its name after the fsync of its folder. Until it is whole, a file or folder has
a temporary name beside its own. That name is fixed, because one process writes there: the one that holds the lock of
the run directory, or, for what an option names (`--out`), a lock beside it.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mezo_cli.errors import FULL, RunFailed, UserError, did_you_mean, join

TEMPORARY = ".{}.tmp"  # of the name of the file or folder that it becomes
LOCK = ".{}.lock"  # of the name of what an option names
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)  # of a file system without fsync: no error


def no_link(name: str, flags: int) -> int:
    """Open a file to write, as `opener` of `open`: never through a link."""
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def end_checksum(path: Path) -> str | None:
    """Return a checksum of a file's size and last 64 bytes; None where there is no file."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 64))
        # A crc of bytes that end with their own crc would always be the same.
        return hashlib.sha256(b"%d " % size + file.read()).hexdigest()[:16]


def is_below(path: Path, folder: Path) -> bool:
    """Return whether a path lies in a folder, as it is written and with its links followed; neither needs to exist."""
    written = [Path(os.path.abspath(each)) for each in (path, folder)]
    return all(folder in path.parents for path, folder in (written, [each.resolve() for each in written]))


# --- write ---


def remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to), or a folder with its content; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk; OSError if it is full or fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with name_in_errors(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` write a file under a temporary name, which then gets the name `path`; nothing if it writes none.

    Readers see the old file or the new one, also after a power cut.
    """
    temporary = path.with_name(TEMPORARY.format(path.name))
    try:
        with name_in_errors(path):
            remove(temporary)
            write(temporary)
            if temporary.exists():
                sync(temporary)
                os.replace(temporary, path)
                sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file in one step, see `replace`. Text is UTF-8."""

    def write(temporary: Path) -> None:
        with open(temporary, "xb") as file:  # which follows no link
            file.write(content.encode() if isinstance(content, str) else content)

    replace(path, write)


@contextlib.contextmanager
def new_folder(path: Path, write: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a folder with the temporary name of `path` that `write` has filled, on the disk, for the block to rename.

    It is removed if the block leaves it there.
    """
    new = path.with_name(TEMPORARY.format(path.name))
    remove(new)
    try:
        new.mkdir()
        write(new)
        for folder, _, names in os.walk(new):
            for each in (*(Path(folder, name) for name in names), Path(folder)):
                sync(each)
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Name the file in an OSError of the block that names none: those of writing, closing and syncing do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_error(path: Path | str, error: Exception) -> UserError | RunFailed:
    """Return the error to report when `path` could not be written: a full disk is not the user's mistake."""
    if isinstance(error, FileExistsError):  # what mkdir raises where a parent is a file
        error = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    by_user = isinstance(error, OSError) and error.errno not in (*FULL, errno.EIO)
    return (UserError if by_user else RunFailed)(f"{path}: cannot be written: {reason}")


# --- what more than one process may write ---


def lock_file(path: Path, seconds: float = 0.0) -> FileLock:
    """Lock a file, which is created, until `release` or the end of the process.

    Raises:
        BlockingIOError: when another process still holds the lock after `seconds`.
    """
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=seconds, poll_interval=0.002)
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, "another process writes it", str(path)) from error
    return lock


@contextlib.contextmanager
def _locked(path: Path, seconds: float = 0.0) -> Iterator[None]:
    """Let this process alone write `path` inside the block. The lock file is removed before its lock is."""
    file = path.with_name(LOCK.format(path.name))
    lock = lock_file(file, seconds)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file that an option names in one step, in place of the old one; OSError if it cannot be written."""
    with name_in_errors(path), _locked(path, seconds=10.0):
        write_atomically(path, content)


def write_folder(path: Path, write: Callable[[Path], None], option: str = "--out") -> None:
    """Write a folder that an option names in one step: `write` fills a folder of another name.

    Raises:
        RunFailed: when the disk is full, or a library fails to write.
        UserError: when the folder has files, cannot be made there, or another process makes it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            check_new_folder(path, option)
            with new_folder(path, write) as new:
                os.rename(new, path)  # onto an empty folder, or where there is nothing
            sync(path.parent)
    except (UserError, RunFailed):
        raise
    except Exception as error:  # a full disk raises different errors in each library
        raise write_error(f"{option} {path}", error) from error


def check_new_folder(path: Path, option: str = "--out") -> None:
    """Check that `write_folder` may make a folder."""
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise UserError(f"{option} {path}: it exists and is not an empty folder")


def check_output(path: Path, formats: Collection[str] = (".csv",), option: str = "--out") -> None:
    """Check that the file of an option can be written, before any run is read; `formats`: allowed extensions."""
    if path.suffix not in formats:
        near = did_you_mean(path.suffix, formats)
        raise UserError(f"{option} {path}: the file extension sets the format; allowed are {join(formats)}{near}")
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder, not a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if (path.parent / "run.json").exists():
        raise UserError(f"{option} {path}: {path.parent} is a run directory; choose another folder")


def write_output(path: Path, content: str | bytes, option: str = "--out") -> None:
    """Write the file that an option named, completely or not at all."""
    try:
        write_file(path, content)
    except OSError as error:
        raise write_error(f"{option} {path}", error) from error
