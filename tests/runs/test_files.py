"""Files are written whole or not at all, and of two processes with one `--out` one wins."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs import files
from mezo_cli.runs.files import write_atomically
from mezo_cli.runs.output import add_files, write_file, write_folder


def test_no_partial_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "old"


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        done.append(f"rename {new.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(tmp_path / "a", "text")
    assert done == ["sync .a.tmp", "rename a", f"sync {tmp_path.name}"]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "file").write_text("text")

    def on_a_full_disk(folder: Path) -> None:
        write(folder)
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors does

    with pytest.raises(RunFailed, match="out: cannot be written: I/O error: No space left"):
        write_folder(tmp_path / "out", on_a_full_disk)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", write)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["out", "out/file"]
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        write_folder(tmp_path / "out" / "file" / "out", write)


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a child, and return its process id; it ends with 0, or with 2 for a `UserError`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except UserError as error:
            os._exit(2 if "it exists and is not an empty folder" in str(error) else 3)
        finally:
            os._exit(4)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 30
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_of_several_that_write_one_folder_at_once_one_wins_and_its_files_are_whole(tmp_path: Path) -> None:
    names = [str(number) for number in range(20)]

    def write(folder: Path, own: str) -> None:
        wait_for(tmp_path, "go")
        for name in names:
            (folder / name).write_text(own)

    children = [forked(lambda own=own: write_folder(tmp_path / "o", lambda f: write(f, own))) for own in "abcd"]  # type: ignore[misc]
    (tmp_path / "go").touch()
    assert sorted(map(ended, children)) == [0, 2, 2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["go", "o"]
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == sorted(names)
    assert len({path.read_text() for path in (tmp_path / "o").iterdir()}) == 1


def test_what_a_killed_process_left_beside_an_output_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    def never_ends(folder: Path) -> None:
        (folder / "half").write_text("half")
        time.sleep(60)

    killed, alive = (forked(lambda: write_folder(tmp_path / "o", never_ends)) for _ in range(2))
    while len(list(tmp_path.glob(".o.*.new/o/half"))) < 2:
        time.sleep(0.001)
    (tmp_path / ".other.new").mkdir()
    (tmp_path / ".o.x.new").symlink_to(tmp_path / ".other.new")  # another user's, in a shared folder
    os.kill(killed, signal.SIGKILL)
    assert ended(killed) == -signal.SIGKILL
    write_file(tmp_path / "o", "text")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 4
    assert {".o.x.new", ".other.new", "o"} < set(left)  # and that of the process that is alive
    os.kill(alive, signal.SIGKILL)
    ended(alive)


def test_files_are_added_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        add_files(tmp_path, {"a": b"1", "b": b"2"})
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    add_files(tmp_path, {"a": b"1", "b": b"theirs"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
