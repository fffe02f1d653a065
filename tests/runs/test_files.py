"""Files are written whole or not at all, and of two processes with one `--out` one wins."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs.atomic import write_atomically, write_file, write_folder


def test_no_partial_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
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
            known = ("it exists and is not an empty folder", "another process writes it")
            os._exit(2 if any(text in str(error) for text in known) else 3)
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

    (tmp_path / ".other.tmp").mkdir()
    running = forked(lambda: write_folder(tmp_path / "o", never_ends))
    wait_for(tmp_path, ".o.tmp/half")
    with pytest.raises(UserError, match="another process writes it"):
        write_folder(tmp_path / "o", never_ends)
    os.kill(running, signal.SIGKILL)
    assert ended(running) == -signal.SIGKILL
    write_file(tmp_path / "o", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", "o"]
