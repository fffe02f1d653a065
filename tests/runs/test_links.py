"""Nothing is written through a link in a run directory, and what is no regular file is refused."""

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from mezo_cli.runs.run import APPENDED, OTHERS, REPLACED
from tests.command_line import error_line, mezo
from tests.runs.test_checkpoints import write
from tests.runs.test_run import new_run


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder with files outside the run, which must stay as it is."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("mine")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "mine"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An interrupted run."""
    made = new_run(tmp_path / "run")
    with contextlib.suppress(KeyboardInterrupt), made.tracked():
        made.log_metrics("train", 1, loss=1.0)
        made.save_checkpoint("best", 0, write("step 0"))  # type: ignore[arg-type]
        made.open_trajectory().close()
        raise KeyboardInterrupt
    return made.path


@pytest.mark.parametrize("target", ["file", "missing"])
@pytest.mark.parametrize("name", [*OTHERS, *APPENDED, "summary.json", "predictions.jsonl"])
def test_a_link_is_refused_before_anything_is_written(run: Path, victim: Path, name: str, target: str) -> None:
    if (run / name).exists():
        (run / name).rename(run / "elsewhere")
    (run / name).symlink_to(victim / target)
    before = {one: one.lstat().st_mtime_ns for one in run.rglob("*")}
    with pytest.raises(UserError, match=f"{name} is a link, and nothing is written through a link"):
        Run(run).claim()
    assert {one: one.lstat().st_mtime_ns for one in run.rglob("*")} == before


@pytest.mark.parametrize("name", [*REPLACED, *APPENDED])
@pytest.mark.parametrize("target", ["file", "missing"])
def test_a_link_with_a_temporary_name_is_removed(run: Path, victim: Path, name: str, target: str) -> None:
    (run / f".{name}.tmp").symlink_to(victim / target)
    claimed = Run.open(run)
    claimed.claim()
    assert not (run / f".{name}.tmp").is_symlink()
    (run / f".{name}.tmp").symlink_to(victim / target)  # and one that comes later is not followed
    claimed.update(status="interrupted")
    claimed.truncate_metrics(1)
    claimed.write_summary({"steps": 1})
    claimed.write_predictions([])
    claimed.save_initial_state(lambda path: path.write_text("weights"))


@pytest.mark.parametrize("name", [".best.new", ".best.old", ".last.new"])
def test_checkpoints_are_written_into_a_new_folder(run: Path, victim: Path, name: str) -> None:
    claimed = Run.open(run)
    (run / "checkpoints" / name).symlink_to(victim)
    claimed.claim()
    (run / "checkpoints" / ".best.new").symlink_to(victim)
    claimed.save_checkpoint("best", 5, write("step 5"))  # type: ignore[arg-type]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["best"]
    assert claimed.checkpoint_step("best") == 5


def test_the_checkpoints_of_a_link_are_not_repaired(run: Path, victim: Path) -> None:
    (run / "checkpoints").rename(run.parent / "moved")
    (run.parent / "moved" / "best").rename(run.parent / "moved" / ".best.old")
    (run / "checkpoints").symlink_to(run.parent / "moved")
    Run.open(run)
    assert [path.name for path in (run.parent / "moved").iterdir()] == [".best.old"]


def test_a_link_that_comes_while_a_run_is_running_is_not_followed(run: Path, victim: Path) -> None:
    claimed = Run.open(run)
    claimed.claim()
    with claimed.tracked():
        for name in ("train.log", "metrics.jsonl"):
            (run / name).unlink()
            (run / name).symlink_to(victim / "file")
        logging.getLogger("mezo").error("a line")
        with pytest.raises(UserError, match=r"metrics\.jsonl is a link"):
            claimed.log_metrics("train", 2, loss=1.0)


def test_links_above_a_run_directory_are_allowed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    claimed = Run.open(tmp_path / "link")
    claimed.claim()
    claimed.log_metrics("train", 2, loss=1.0)
    claimed.save_checkpoint("best", 5, write("step 5"))  # type: ignore[arg-type]
    assert len(Run(run).metrics()) == 2


def test_a_logger_may_make_links_inside_its_folder_and_none_leads_out(run: Path, victim: Path) -> None:
    folder = Run(run).make_logger_folder("wandb")
    (folder / "run-1").mkdir()
    (folder / "latest-run").symlink_to("run-1")
    assert Run(run).make_logger_folder("wandb") == folder
    (folder / "run-1" / "log").symlink_to(victim / "file")
    with pytest.raises(UserError, match="is a link that leads out of"):
        Run(run).make_logger_folder("wandb")
    (run / "tensorboard").symlink_to(victim)
    with pytest.raises(UserError, match="tensorboard is a link"):
        Run(run).make_logger_folder("tensorboard")


@pytest.mark.parametrize("name", [".lock", "run.json", "metrics.jsonl", "trajectory.bin", "train.log"])
def test_a_pipe_is_refused_by_readers_and_writers(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    signal.alarm(60)  # today's hang would be one for ever
    try:
        with pytest.raises(UserError, match=f"{name}.* is not a regular file"):
            Run(run).claim()
        if name not in (".lock", "train.log", "trajectory.bin"):
            assert f"{name} is damaged: it is not a regular file" in mezo("runs", run.parent).out
            assert name in error_line(mezo("show", run))
    finally:
        signal.alarm(0)
