"""Files, folders and checkpoints are written whole or not at all, and of two processes with one `--out` one wins."""

import os
from pathlib import Path

import pytest

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs import Run, checkpoints
from mezo_cli.runs.atomic import LOCK, lock_file, write_atomically, write_file, write_folder
from tests.runs.test_run import new_run


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


def write(content: str) -> object:
    def files(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(content)
        (folder / "config.json").write_text("{}")

    return files


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.save_checkpoint("best", 0, write("step 0"))  # type: ignore[arg-type]

    def full(folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match=r"step 5: checkpoint .*best: cannot be written: .*No space left"):
        run.save_checkpoint("best", 5, full)
    assert run.checkpoint_step("best") == 0
    checkpoints.verify(run.checkpoints / "best")
    assert [p.name for p in run.checkpoints.iterdir()] == ["best"]


@pytest.mark.parametrize("cut", ["before", "between", "after"])
def test_a_crash_within_the_swap_is_repaired(tmp_path: Path, cut: str) -> None:
    with new_run(tmp_path).tracked():
        run = Run(tmp_path)
        run.save_checkpoint("best", 0, write("step 0"))  # type: ignore[arg-type]
    folder = tmp_path / "checkpoints"
    if cut == "before":
        write("half")(folder / ".best.tmp")  # type: ignore[operator]
    elif cut == "between":
        (folder / "best").rename(folder / ".best.old")
    else:
        write("older")(folder / ".best.old")  # type: ignore[operator]
    run = Run.open(tmp_path)
    assert run.checkpoint_step("best") == 0
    checkpoints.verify(folder / "best")
    run.save_checkpoint("best", 5, write("step 5"))  # type: ignore[arg-type]
    assert [p.name for p in folder.iterdir()] == ["best"]


def test_a_reader_repairs_nothing_in_a_running_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.update(status="running")
    run.save_checkpoint("best", 0, write("step 0"))  # type: ignore[arg-type]
    (run.checkpoints / "best").rename(run.checkpoints / ".best.old")
    Run.open(tmp_path)
    assert (run.checkpoints / ".best.old").exists()
