"""See every file operation of this process in one folder: record them, stop before one, or let the disk fill.

`Watch.install` replaces `open`, the functions of `os` that change files, and safetensors' writing, for good: it is
meant for a forked child. What a library writes in C or Rust is not seen when it happens. A recording finds it by
looking at the folder before the next operation, and logs it as one write of the whole file.
"""

import builtins
import errno
import io
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# (kind, path relative to the folder, argument): the other name of a rename, the offset and the bytes of a write, the
# size of a truncation; None for create, unlink, rmdir, mkdir and fsync. "" is the folder itself.
Operation = tuple[str, str, Any]

_FILE_IO, _OPEN, _LSTAT = io.FileIO, builtins.open, os.lstat


class Watch:
    """What happens at the file operations under `root`.

    Args:
        root: the folder; it need not exist yet.
        kill_at: end the process by SIGKILL just before this operation (the first is number 1).
        half: if that operation is a write, do the first half of it before.
        signal_at: the same with a signal that the process can handle.
        signum: that signal.
        room: bytes that fit under `root`; what needs more fails as on a full disk. None: any number.
        record_to: a file that `save` writes the list of operations to.
    """

    def __init__(
        self,
        root: str,
        kill_at: int = 0,
        half: bool = False,
        signal_at: int = 0,
        signum: int = signal.SIGINT,
        room: int | None = None,
        record_to: str = "",
    ) -> None:
        self.root = os.path.realpath(root)
        self.kill_at, self.half, self.signal_at, self.signum = kill_at, half, signal_at, signum
        self.room, self.record_to = room, record_to
        self.count = 0
        self.log: list[Operation] = []
        self._known: dict[str, tuple[int, int]] = {}  # file -> (size, time of change) after the last operation

    # --- what happens at an operation ---

    @contextmanager
    def operation(self, kind: str, path: str | None, argument: Any = None) -> Iterator[None]:
        """Surround one operation; it is recorded when it succeeds. A path of None lies elsewhere."""
        if path is None:
            yield
            return
        self.before(kind, path)
        yield
        self.after(kind, path, argument)

    def before(self, kind: str, path: str, half: Callable[[], None] | None = None) -> None:
        """Count an operation, and stop here if this is the one."""
        if self.record_to:
            self._find_unseen()
        self.count += 1
        if self.count == self.kill_at:
            if half is not None and self.half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self.signal_at:
            os.kill(os.getpid(), self.signum)
        if self.room is not None and kind in ("create", "mkdir") and self._used() >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.path.join(self.root, path))

    def after(self, kind: str, path: str, argument: Any = None) -> None:
        """Record an operation."""
        if self.record_to:
            self.log.append((kind, path, argument))
            self._known = dict(self._files())

    def fits(self, size: int) -> int:
        """Return how many of `size` more bytes there is room for."""
        return size if self.room is None else max(0, min(size, self.room - self._used()))

    def save(self) -> None:
        """Write the recorded operations to `record_to`."""
        if self.record_to:
            self._find_unseen()
            with _OPEN(self.record_to, "wb") as file:
                pickle.dump((self.count, self.log), file)

    def _used(self) -> int:
        return sum(size for _, (size, _) in self._files())

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        folders = [self.root]
        while folders:
            folder = folders.pop()
            for entry in os.scandir(folder) if os.path.isdir(folder) else ():
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    state = _LSTAT(entry.path)
                    yield os.path.relpath(entry.path, self.root), (state.st_size, state.st_mtime_ns)

    def _find_unseen(self) -> None:
        now = dict(self._files())
        for name in sorted(now):
            if now[name] != self._known.get(name):
                with _OPEN(os.path.join(self.root, name), "rb") as file:
                    data = file.read()
                if name not in self._known:
                    self.log.append(("create", name, None))
                self.log.append(("truncate", name, 0))
                self.log.append(("write", name, (0, data)))
        self._known = now

    # --- names ---

    def relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path relative to the folder, None for one that does not lie in it."""
        if isinstance(path, int):
            text = os.readlink(f"/proc/self/fd/{path}")
        else:
            text = os.fsdecode(path)
            if dir_fd is not None and not os.path.isabs(text):
                text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
            folder, name = os.path.split(os.path.abspath(text))
            text = os.path.join(os.path.realpath(folder), name)
        if text == self.root:
            return ""
        inside = text.startswith(self.root + os.sep) and not text.endswith(" (deleted)")
        return text[len(self.root) + 1 :] if inside else None

    # --- the replaced functions ---

    def install(self) -> None:
        """Replace the functions. There is no way back."""
        self._install_open()
        for name in ("unlink", "remove", "rmdir", "mkdir"):
            self._install_named("unlink" if name == "remove" else name, name)
        for name in ("rename", "replace"):
            self._install_rename(name)
        for name in ("fsync", "fdatasync"):
            self._install_fsync(name)
        self._install_descriptors()
        self._install_safetensors()

    def _install_named(self, kind: str, name: str) -> None:
        real = getattr(os, name)

        def patched(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            extra = {} if dir_fd is None else {"dir_fd": dir_fd}
            with self.operation(kind, self.relative(path, dir_fd)):
                real(path, *args, **extra, **kwargs)

        setattr(os, name, patched)
        _replace_in_sets(real, patched)

    def _install_rename(self, name: str) -> None:
        real = getattr(os, name)

        def patched(src: Any, dst: Any, **kwargs: Any) -> None:
            old, new = self.relative(src, kwargs.get("src_dir_fd")), self.relative(dst, kwargs.get("dst_dir_fd"))
            with self.operation("rename", old, new):
                real(src, dst, **kwargs)

        setattr(os, name, patched)

    def _install_fsync(self, name: str) -> None:
        real = getattr(os, name)

        def patched(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            with self.operation("fsync", self.relative(number)):
                real(number)

        setattr(os, name, patched)

    def _install_descriptors(self) -> None:
        real_open, real_write, real_truncate = os.open, os.write, os.truncate

        def patched_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            name = self.relative(path, dir_fd)
            kind = _opening(path, bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC), dir_fd)
            with self.operation(kind, name if kind else None, 0 if kind == "truncate" else None):
                return real_open(path, flags, mode, dir_fd=dir_fd)

        def patched_write(fd: int, data: Any) -> int:
            name = self.relative(fd)
            return real_write(fd, data) if name is None else self._write(name, fd, bytes(data))

        def patched_truncate(path: Any, length: int) -> None:
            with self.operation("truncate", self.relative(path), length):
                real_truncate(path, length)

        self._real_write = real_write
        os.open, os.write, os.truncate, os.ftruncate = patched_open, patched_write, patched_truncate, patched_truncate
        _replace_in_sets(real_open, patched_open)

    def _write(self, name: str, fd: int, data: bytes) -> int:
        """Write to a descriptor, as much of it as there is room for."""
        flags = int(_OPEN(f"/proc/self/fdinfo/{fd}").read().split("flags:")[1].split()[0], 8)
        offset = os.fstat(fd).st_size if flags & os.O_APPEND else os.lseek(fd, 0, os.SEEK_CUR)
        self.before("write", name, lambda: self._real_write(fd, data[: len(data) // 2]) and None)
        size = self.fits(len(data))
        if size == 0 and data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._real_write(fd, data[:size])
        self.after("write", name, (offset, data[:written]))
        return written

    def _install_open(self) -> None:
        watch = self

        class Raw(_FILE_IO):
            """A file whose writes are seen."""

            def write(self, data: Any) -> int:
                name = watch.relative(self.fileno())
                return int(super().write(data) if name is None else watch._write(name, self.fileno(), bytes(data)))

            def truncate(self, size: int | None = None) -> int:
                length = self.tell() if size is None else size
                with watch.operation("truncate", watch.relative(self.fileno()), length):
                    return super().truncate(length)

        def patched(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            plain = not set(mode) & set("wax+")
            name = None if plain else self.relative(file)
            if name is None:
                return _OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
            kind = "" if isinstance(file, int) or opener else _opening(file, bool(set(mode) & set("wax")), "w" in mode)
            with self.operation(kind, name if kind else None, 0 if kind == "truncate" else None):
                raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffer
            return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)

        builtins.open = io.open = patched

    def _install_safetensors(self) -> None:
        import safetensors
        import safetensors.numpy
        import safetensors.torch

        real = safetensors.serialize_file

        def patched(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            name = self.relative(filename)
            if name is None:
                return real(tensors, filename, *args, **kwargs)

            def half() -> None:
                real(tensors, filename, *args, **kwargs)
                with _OPEN(filename, "r+b") as file:
                    file.truncate(os.path.getsize(filename) // 2)

            self.before("write", name, half)
            real(tensors, filename, *args, **kwargs)
            if self.room is not None and self._used() > self.room:
                with _OPEN(filename, "r+b") as file:
                    file.truncate(max(0, os.path.getsize(filename) - (self._used() - self.room)))
                raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
            if self.record_to:
                self._find_unseen()

        for module in (safetensors, safetensors.numpy, safetensors.torch):
            module.serialize_file = patched  # type: ignore[attr-defined]


def _opening(path: Any, creates: bool, empties: bool, dir_fd: int | None = None) -> str:
    """Return what opening a file does to it: create, truncate, or nothing."""
    try:
        os.stat(path, dir_fd=dir_fd)
    except OSError:
        return "create" if creates else ""
    return "truncate" if empties else ""


def _replace_in_sets(real: Any, patched: Any) -> None:
    """Keep what `os` says of a function: shutil asks whether it takes a directory descriptor."""
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real in known:
            known.add(patched)


def load(path: Path) -> tuple[int, list[Operation]]:
    """Read what `Watch.save` wrote: the number of operations that can be stopped before, and those recorded."""
    with open(path, "rb") as file:
        count, log = pickle.load(file)
    return count, log
