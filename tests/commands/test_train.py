"""`mezo train`: run directories, and what a run no longer needs once it is started."""

import re
import shutil
from pathlib import Path

import pytest

from mezo_cli import runs
from mezo_cli.config.choices import CONF
from mezo_cli.runs import Run
from tests.command_line import HANGS, Result, error_line, mezo, small, start

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def test_run_directories_have_a_name_of_their_own(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = [word for word in small(roberta, movies, tmp_path, "steps=1") if not word.startswith("hydra")]
    for _ in range(2):
        assert mezo("train", *words).code == 0
    found = [run.path.relative_to(tmp_path).as_posix() for run in runs.find_runs(tmp_path / "outputs")]
    assert len(found) == 2
    for name in found:
        assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-sst2-mlm-mezo-[0-9a-f]{6}", name)
    assert {p.name for p in tmp_path.iterdir()} == {"outputs", "movies"}
    assert mezo("train", *words, "hydra.run.dir=runs/${task.name}-${seed}-${hydra.job.name}").code == 0
    assert Run(tmp_path / "runs" / "sst2-42-mezo").info()["status"] == "finished"


@pytest.mark.slow
def test_a_reader_that_went_away_does_not_stop_a_run(roberta: Path, movies: Path, tmp_path: Path) -> None:
    process = start("train", *small(roberta, movies, tmp_path / "run"), cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=HANGS) in (0, 1)
    assert Run(tmp_path / "run").info()["status"] == "finished"
    assert "test at best" in (tmp_path / "run" / "train.log").read_text()
    assert "Traceback" not in process.stderr.read()


def test_quiet_prints_the_directory_and_warnings_only(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = small(roberta, movies, tmp_path / "run", "objective=cls", "steps=1")
    said = mezo("train", "-q", *words)
    assert (said.code, said.out) == (0, "run\n")
    assert said.err.startswith("a new classification head")
    assert said.err.count("\n") == 1
    assert "test at best" in (tmp_path / "run" / "train.log").read_text()
    assert mezo("resume", "-q", tmp_path / "run") == Result(0, "run\n", "")  # finished: nothing to do
    assert mezo("resume", "-q", tmp_path / "run", "steps=2") == Result(0, "run\n", "")
    assert Run(tmp_path / "run").read_summary()["steps"] == 2
    assert "already holds a run" in error_line(mezo("train", "-q", *words))


def test_a_run_of_the_users_own_task_needs_their_folder_no_more(roberta: Path, movies: Path, tmp_path: Path) -> None:
    folder = tmp_path / "conf"
    (folder / "task").mkdir(parents=True)
    text = (CONF / "task" / "sst2.yaml").read_text()
    (folder / "task" / "mine.yaml").write_text(text.replace("name: sst2", "name: mine", 1))
    words = small(roberta, movies, tmp_path / "run", "task=mine", "steps=1")
    assert mezo("train", *words, "--config-dir", folder).code == 0
    shutil.rmtree(folder)
    assert mezo("eval", tmp_path / "run").code == 0
    assert "mine" in mezo("runs", tmp_path).out
