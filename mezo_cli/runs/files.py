"""Write files and folders whole or not at all, so that they survive a power cut; read JSON, naming the file in errors.

A file's bytes are safe after its fsync, its name after the fsync of its folder.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mezo_cli.errors import FULL, RunFailed, UserError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file in one step: readers see the old content or the new, also after a power cut. Text is UTF-8."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with name_in_errors(path):
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Write a folder in one step: `write` makes and fills a folder of another name, which is synced and renamed.

    Args:
        path: the folder; it does not exist, or is empty.
        write: makes the folder that it is given, and writes its files.

    Raises:
        RunFailed: when the disk is full, or a library fails to write.
        UserError: when the folder cannot be made there.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new_folder(new, write)
        os.rename(new, path)
        sync(path.parent)
    except (UserError, RunFailed):
        raise
    except Exception as error:  # a full disk raises different errors in each library
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def check_new_folder(path: Path, option: str = "--out") -> None:
    """Check that `write_folder` may make a folder.

    Raises:
        UserError: when it is a file or not empty; `option` names the argument of the command line.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{option} {path}: it exists and is not an empty folder")


def write_new_folder(new: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a folder, in place of what an earlier process left there, and sync it with all its files."""
    shutil.rmtree(new, ignore_errors=True)
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
    written = [Path(os.path.abspath(one)) for one in (path, folder)]
    return all(folder in path.parents for path, folder in (written, [one.resolve() for one in written]))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        UserError: when the file is missing or damaged.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value
