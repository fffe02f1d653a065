"""Checkpoints replace one another whole, and every change of their files shows."""

from pathlib import Path

import pytest

from mezo_cli.errors import RunFailed
from mezo_cli.runs import Run, checkpoints
from tests.runs.test_run import new_run


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
