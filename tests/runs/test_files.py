"""Files are written whole or not at all, and of two processes with one `--out` one wins."""

import os
from pathlib import Path

import pytest

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs.atomic import LOCK, lock_file, write_atomically, write_file, write_folder


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


def test_what_another_process_writes_is_refused_and_its_leftovers_go(tmp_path: Path) -> None:
    """The campaign kills such commands, and runs two of them at once (tests/campaign/stops.py)."""
    lock = lock_file(tmp_path / LOCK.format("o"))
    with pytest.raises(UserError, match="another process writes it"):
        write_folder(tmp_path / "o", Path.mkdir)
    lock.release()
    (tmp_path / ".other.tmp").mkdir()
    (tmp_path / ".o.tmp").mkdir()
    write_file(tmp_path / "o", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", "o"]
