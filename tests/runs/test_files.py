"""Files are written whole or not at all."""

import os
from pathlib import Path

import pytest

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs import files
from mezo_cli.runs.files import write_atomically, write_folder


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
        folder.mkdir()
        (folder / "file").write_text("text")

    def on_a_full_disk(folder: Path) -> None:
        write(folder)
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors does

    with pytest.raises(RunFailed, match="out: cannot be written: I/O error: No space left"):
        write_folder(tmp_path / "out", on_a_full_disk)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.new").mkdir()  # of a process that was killed
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", write)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["out", "out/file"]
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        write_folder(tmp_path / "out" / "file" / "out", write)
