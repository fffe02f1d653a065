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

KINDS = {"remove": "unlink", "replace": "rename", "fdatasync": "fsync", "ftruncate": "truncate"}
KINDS |= {name: name for name in ("unlink", "rmdir", "mkdir", "rename", "fsync", "truncate")}
UNSEEN = "unseen"  # the kind of what a library writes: found by a look at the folder
_OPEN, _LSTAT, _WRITE = io.open, os.lstat, os.write
FULL = (errno.ENOSPC, os.strerror(errno.ENOSPC))


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

    @contextmanager
    def operation(
        self, kind: str, path: str | None, argument: Any = None, half: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Surround one operation: count it, stop before it if it is the one, record it when it has succeeded.

        Args:
            kind, path, argument: of an `Operation`; a path of None lies elsewhere.
            half: does the first half of it.
        """
        if path is None:
            yield
            return
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
            raise OSError(*FULL, os.path.join(self.root, path))
        yield
        if self.record_to and kind != UNSEEN:
            self.log.append((kind, path, argument))
            self._known = dict(self._files())

    def save(self) -> None:
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
                self.log += [] if name in self._known else [("create", name, None)]
                self.log += [("truncate", name, 0), ("write", name, (0, data))]
        self._known = now

    def relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path (or that of a descriptor) relative to the folder, None for one that does not lie in it."""
        if isinstance(path, int) or hasattr(path, "fileno"):
            text = os.readlink(f"/proc/self/fd/{path if isinstance(path, int) else path.fileno()}")
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

    def write(self, name: str, fd: int, data: bytes) -> int:
        """Write to a descriptor, as much of it as there is room for."""
        flags = int(_OPEN(f"/proc/self/fdinfo/{fd}").read().split("flags:")[1].split()[0], 8)
        offset = os.fstat(fd).st_size if flags & os.O_APPEND else os.lseek(fd, 0, os.SEEK_CUR)
        fits = len(data) if self.room is None else max(0, min(len(data), self.room - self._used()))
        with self.operation("write", name, (offset, data[:fits]), lambda: _WRITE(fd, data[: len(data) // 2])):
            if fits == 0 and data:
                raise OSError(*FULL)
            return _WRITE(fd, data[:fits])

    # --- the replaced functions ---

    def install(self) -> None:
        """Replace the functions. There is no way back."""
        for name, kind in KINDS.items():
            self._install_named(name, kind)
        self._install_descriptors()
        self._install_open()
        self._install_safetensors()

    def _install_named(self, name: str, kind: str) -> None:
        real = getattr(os, name)

        def patched(path: Any, *args: Any, **kwargs: Any) -> None:
            argument = args[0] if kind == "truncate" else None
            if kind == "rename":
                argument = self.relative(args[0], kwargs.get("dst_dir_fd"))
            folder = kwargs.get("src_dir_fd" if kind == "rename" else "dir_fd")
            with self.operation(kind, self.relative(path, folder), argument):
                real(path, *args, **kwargs)

        setattr(os, name, patched)
        _replace_in_sets(real, patched)

    def _install_descriptors(self) -> None:
        real = os.open

        def patched_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            kind = _opening(path, bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC), dir_fd)
            name = self.relative(path, dir_fd) if kind else None
            with self.operation(kind, name, 0 if kind == "truncate" else None):
                return real(path, flags, mode, dir_fd=dir_fd)

        def patched_write(fd: int, data: Any) -> int:
            name = self.relative(fd)
            return _WRITE(fd, data) if name is None else self.write(name, fd, bytes(data))

        os.open, os.write = patched_open, patched_write
        _replace_in_sets(real, patched_open)

    def _install_open(self) -> None:
        watch = self

        class Raw(io.FileIO):
            """A file whose writes are seen."""

            def write(self, data: Any) -> int:
                name = watch.relative(self.fileno())
                return int(super().write(data) if name is None else watch.write(name, self.fileno(), bytes(data)))

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
            name = self.relative(file) if set(mode) & set("wax+") else None
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
        import safetensors.numpy
        import safetensors.torch

        real = safetensors.serialize_file

        def cut(filename: Any, size: int) -> None:
            with _OPEN(filename, "r+b") as file:
                file.truncate(max(0, size))

        def patched(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            def half() -> None:
                real(tensors, filename, *args, **kwargs)
                cut(filename, os.path.getsize(filename) // 2)

            name = self.relative(filename)
            with self.operation(UNSEEN, name, half=half):
                real(tensors, filename, *args, **kwargs)
                if name is not None and self.room is not None and self._used() > self.room:
                    cut(filename, os.path.getsize(filename) - (self._used() - self.room))
                    raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

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
    return pickle.loads(path.read_bytes())
