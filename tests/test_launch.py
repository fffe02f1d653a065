"""Sweeps and run directories: every job its own, one job's failure its own, Ctrl-C the whole sweep's."""

import gc
import re
import shutil
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import config, loop, runs, session, weights
from mezo_cli.optim import Mezo
from mezo_cli.runs import Run
from tests.door import mezo, refused, small, start


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    monkeypatch.chdir(tmp_path)


def sweep(model: Any, movies: Path, folder: Path, *more: str) -> list[str]:
    words = [word for word in small(model, movies, folder, "steps=2", *more) if not word.startswith("hydra.run.dir")]
    return ["-m", *words, f"hydra.sweep.dir={folder}"]


def test_run_directories_have_a_name_of_their_own(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = [word for word in small(roberta, movies, tmp_path, "steps=1") if not word.startswith("hydra")]
    for _ in range(2):
        assert mezo("train", *words).code == 0
    found = [run.path.relative_to(tmp_path).as_posix() for run in runs.find(tmp_path / "outputs")]
    assert len(found) == 2
    for name in found:
        assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-sst2-mlm-mezo-[0-9a-f]{6}", name)
    assert {p.name for p in tmp_path.iterdir()} == {"outputs", "movies"}


def test_a_sweep_gives_each_job_a_directory(roberta: Path, movies: Path, tmp_path: Path) -> None:
    said = mezo("train", "seed=13,42", *sweep(roberta, movies, tmp_path / "sweep", "optimizer.lr=1e-2,1e-3"))
    assert said.code == 0, said
    got = {(r.info()["status"], (r.path / "config.yaml").read_text()) for r in runs.find(tmp_path / "sweep")}
    pairs = {re.search(r"lr: (\S+).*\nseed: (\d+)", text, re.S).groups() for _, text in got}  # type: ignore[union-attr]
    assert pairs == {("0.01", "13"), ("0.01", "42"), ("0.001", "13"), ("0.001", "42")}
    assert {status for status, _ in got} == {"finished"}
    assert sorted(r.path.name for r in runs.find(tmp_path / "sweep")) == ["0", "1", "2", "3"]
    assert "job 4 of 4  seed=42 optimizer.lr=0.001" in said.out
    assert "4 of 4 jobs finished" in said.out


def test_a_missing_model_fails_its_own_job_only(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep("x", movies, tmp_path / "sweep")
    words = [word for word in words if not word.startswith("model.path")]
    said = mezo("train", *words, f"model.path={tmp_path}/none,{roberta}")
    assert said.code == 1, said
    first, second = Run(tmp_path / "sweep" / "0"), Run(tmp_path / "sweep" / "1")
    assert (first.info()["status"], second.info()["status"]) == ("failed", "finished")
    for told in (first.info()["error"], (first.path / "train.log").read_text(), said.err):
        assert f"model.path={tmp_path}/none" in told
    assert said.err.startswith("failed: job 1 (model.path=")
    assert said.err.count("\n") == 1
    assert "1 of 2 jobs finished" in said.out


def test_so_does_a_loss_that_is_no_number_and_a_crash(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Mezo.step

    def crash(self: Mezo, *args: Any) -> Any:
        if self.seed == 2:
            raise RuntimeError("the machine\nsneezed")
        return step(self, *args)

    monkeypatch.setattr(Mezo, "step", crash)
    said = mezo("train", *sweep(roberta, movies, tmp_path / "sweep", "seed=1,2", "optimizer.lr=1e-3,1e30"))
    assert said.code == 1
    statuses = [Run(tmp_path / "sweep" / str(i)).info()["status"] for i in range(4)]
    assert statuses == ["finished", "failed", "failed", "failed"]
    log = (tmp_path / "sweep" / "2" / "train.log").read_text()
    assert "Traceback" in log
    assert "sneezed" in log
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 3


def test_a_sweep_with_a_typo_starts_nothing(roberta: Path, movies: Path, tmp_path: Path) -> None:
    for bad in ("task=sst2,nosuch", "seed=1,x", "batch_size=8,0"):
        refused(mezo("train", *sweep(roberta, movies, tmp_path / "sweep", bad)))
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_into_its_own_directory_again_harms_nothing(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2")
    assert mezo("train", *words).code == 0
    before = {p: p.read_bytes() for p in (tmp_path / "sweep").rglob("*") if p.is_file() and p.name != "multirun.yaml"}
    said = mezo("train", *words)
    assert said.code == 1
    assert said.err.count("already holds a run") == 2
    assert all(p.read_bytes() == data for p, data in before.items())


def test_ctrl_c_stops_the_sweep(roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = loop.train

    def interrupted(config: Any, *args: Any) -> Any:
        if config.seed == 2:
            raise KeyboardInterrupt
        return train(config, *args)

    monkeypatch.setattr(loop, "train", interrupted)
    said = mezo("train", *sweep(roberta, movies, tmp_path / "sweep", "seed=1,2,3"))
    assert (said.code, said.err) == (130, "error: interrupted\n")
    assert [Run(tmp_path / "sweep" / str(i)).info()["status"] for i in range(2)] == ["finished", "interrupted"]
    assert not (tmp_path / "sweep" / "2").exists()


def test_a_real_ctrl_c_does(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2", "steps=100000", "eval_every=0")
    process = start("train", *words, cwd=tmp_path)
    metrics = tmp_path / "sweep" / "0" / "metrics.jsonl"
    for _ in range(6000):
        if metrics.exists() or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "error: interrupted\n")
    assert Run(tmp_path / "sweep" / "0").info()["status"] == "interrupted"
    assert not (tmp_path / "sweep" / "1").exists()


def test_a_reader_that_went_away_does_not_stop_a_run(roberta: Path, movies: Path, tmp_path: Path) -> None:
    process = start("train", *small(roberta, movies, tmp_path / "run"), cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) in (0, 1)
    assert Run(tmp_path / "run").info()["status"] == "finished"
    assert "test at best" in (tmp_path / "run" / "train.log").read_text()
    assert "Traceback" not in process.stderr.read()


def test_a_run_of_the_users_own_task_needs_their_folder_no_more(roberta: Path, movies: Path, tmp_path: Path) -> None:
    folder = tmp_path / "conf"
    (folder / "task").mkdir(parents=True)
    text = (config.conf_dir() / "task" / "sst2.yaml").read_text()
    (folder / "task" / "mine.yaml").write_text(text.replace("name: sst2", "name: mine", 1))
    words = small(roberta, movies, tmp_path / "run", "task=mine", "steps=1")
    assert mezo("train", *words, "--config-dir", folder).code == 0
    shutil.rmtree(folder)
    assert mezo("eval", tmp_path / "run").code == 0
    assert "mine" in mezo("runs", tmp_path).out


def test_there_is_one_model_at_a_time(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks and modules hold one another: a large model would stay beside the next one, or beside the best."""
    alive: list[weakref.ref[Any]] = []
    counts = []
    prepare = session.prepare

    def counted(*args: Any) -> Any:
        counts.append(sum(ref() is not None for ref in alive))
        made = prepare(*args)
        alive.append(weakref.ref(made.loaded.model))
        return made

    monkeypatch.setattr(loop, "prepare", counted)
    monkeypatch.setattr(weights, "prepare", counted)
    gc.disable()
    try:  # at lr 0 the first evaluation is the best
        words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2", "optimizer.lr=0")
        assert mezo("train", *words).code == 0
    finally:
        gc.enable()
    assert counts == [0, 0, 0, 0]
