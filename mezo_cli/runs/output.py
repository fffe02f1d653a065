"""Write what an option names (`--out`, `--export`): a file or folder that appears whole under its name, or not at all.

It is made in a folder beside it that has a random name and belongs to this process, so that of two commands with one
`--out` neither touches what the other writes. A folder never replaces one that has files; a file replaces the old one.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs.files import lock_file, name_in_errors, sync, write_error, write_new_folder

LOCK = ".lock"  # in the folder beside
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system without hard links


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file in one step, in place of the old one. Text is UTF-8.

    Raises:
        OSError: when it cannot be written.
    """
    with name_in_errors(path), _folder_beside(path) as folder:
        new = folder / path.name
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(new)
        os.replace(new, path)
        sync(path.parent)


def write_folder(path: Path, write: Callable[[Path], None], option: str = "--out") -> None:
    """Write a folder in one step: `write` fills a folder of another name, which is synced and renamed.

    Args:
        path: the folder; it does not exist, or is empty.
        write: writes the files into the empty folder that it is given.
        option: of the command line, which named it.

    Raises:
        RunFailed: when the disk is full, or a library fails to write.
        UserError: when the folder cannot be made there, or another process has made it in the meantime.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(path) as outer:
            new = outer / path.name
            write_new_folder(new, write)
            try:
                os.rename(new, path)  # onto an empty folder, or where there is nothing
            except OSError:
                check_new_folder(path, option)
                raise
            sync(path.parent)
    except (UserError, RunFailed):
        raise
    except Exception as error:  # a full disk raises different errors in each library
        raise write_error(f"{option} {path}", error) from error


def check_new_folder(path: Path, option: str = "--out") -> None:
    """Check that `write_folder` may make a folder."""
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise UserError(f"{option} {path}: it exists and is not an empty folder")


def add_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files into a folder that has others, all or none; a file that has this content already stays.

    Raises:
        FileExistsError: when one of the names is taken by other content.
        OSError: when they cannot be written.
    """
    placed: list[Path] = []
    with _folder_beside(folder / "files") as new:
        for name, content in contents.items():
            (new / name).write_bytes(content)
            sync(new / name)
        try:
            for name, content in contents.items():
                if not (folder / name).is_file() or (folder / name).read_bytes() != content:
                    _place(new / name, folder / name)
                    placed.append(folder / name)
        except BaseException:
            for path in placed:
                path.unlink(missing_ok=True)
            raise
    sync(folder)


def _place(new: Path, path: Path) -> None:
    """Give a file its name, which must be free: renaming would replace what has the name."""
    try:
        os.link(new, path)
    except OSError as error:
        if error.errno not in NO_LINKS or os.path.lexists(path):
            raise
        os.rename(new, path)


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, for this process alone, which locks it; it is removed at the end.

    One that is not locked was left by a process that was killed, and is removed.
    """
    prefix, suffix = f".{path.name[:100]}.", ".new"
    with contextlib.suppress(OSError):  # a folder that may be written, but not read
        for left in path.parent.iterdir():
            if left.name.startswith(prefix) and left.name.endswith(suffix) and not left.is_symlink():
                _remove_unlocked(left)
    lock = None
    while lock is None:  # another process may take it for one that was left, before it is locked
        folder = Path(tempfile.mkdtemp(suffix, prefix, path.parent))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = lock_file(folder / LOCK)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_unlocked(folder: Path) -> None:
    with contextlib.suppress(OSError):
        lock = lock_file(folder / LOCK)
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
