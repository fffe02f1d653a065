"""`mezo train -m`: each job has its own directory and its own failure; a sweep that was stopped can go on."""

import importlib
import json
import pickle
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from mezo_cli import runs
from mezo_cli.commands import sweep as sweeping
from mezo_cli.optim.mezo import Mezo
from mezo_cli.runs import Run
from mezo_cli.training import loop
from tests.command_line import Result, error_line, mezo, small, stopped_at
from tests.live_models import count_live

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def sweep(model: Any, movies: Path, folder: Path, *more: str) -> list[str]:
    words = [word for word in small(model, movies, folder, "steps=2", *more) if not word.startswith("hydra.run.dir")]
    return ["-m", *words, f"hydra.sweep.dir={folder}"]


def statuses(folder: Path) -> dict[str, str]:
    """The status of each job by its directory."""
    return {run.path.name: run.status() for run in runs.find_runs(folder)}


def test_a_sweep_gives_each_job_a_directory(roberta: Path, movies: Path, tmp_path: Path) -> None:
    said = mezo("train", "seed=13,42", *sweep(roberta, movies, tmp_path / "sweep", "optimizer.lr=1e-2,1e-3"))
    assert said.code == 0, said
    got = {(r.info()["status"], (r.path / "config.yaml").read_text()) for r in runs.find_runs(tmp_path / "sweep")}
    pairs = {re.search(r"lr: (\S+).*\nseed: (\d+)", text, re.S).groups() for _, text in got}  # type: ignore[union-attr]
    assert pairs == {("0.01", "13"), ("0.01", "42"), ("0.001", "13"), ("0.001", "42")}
    assert {status for status, _ in got} == {"finished"}
    assert sorted(r.path.name for r in runs.find_runs(tmp_path / "sweep")) == ["0", "1", "2", "3"]
    assert "job 4 of 4  seed=42 optimizer.lr=0.001" in said.out
    assert "4 of 4 jobs finished" in said.out


def test_a_missing_model_fails_its_own_job_only(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep("x", movies, tmp_path / "sweep")
    words = [word for word in words if not word.startswith("model.path")]
    said = mezo("train", *words, f"model.path={tmp_path}/none,{roberta}")
    assert said.code == 1, said
    first, second = Run(tmp_path / "sweep" / "0"), Run(tmp_path / "sweep" / "1")
    assert (first.info()["status"], second.info()["status"]) == ("failed", "finished")
    for text in (first.info()["error"], (first.path / "train.log").read_text(), said.err):
        assert f"model.path={tmp_path}/none" in text
    assert said.err.startswith("failed: job 1 (model.path=")
    assert said.err.count("\n") == 1
    assert "1 of 2 jobs finished" in said.out


def test_a_loss_that_is_not_finite_and_a_crash_fail_their_own_jobs_only(
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
        error_line(mezo("train", *sweep(roberta, movies, tmp_path / "sweep", bad)))
    assert not (tmp_path / "sweep").exists()


def files(folder: Path) -> dict[Path, bytes]:
    """Every file of a sweep's runs."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent != folder}


def test_a_finished_sweep_is_left_as_it_is(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2")
    assert mezo("train", *words).code == 0
    before = files(tmp_path / "sweep")
    assert mezo("train", "-q", *words) == Result(0, "sweep\n", "")
    for again in (["train", *words], ["resume", tmp_path / "sweep"]):
        said = mezo(*again)
        assert said.code == 0, said
        assert said.out.count("finished before: skipped") == 2
        assert "2 of 2 jobs finished" in said.out
        assert files(tmp_path / "sweep") == before


# --- validation ---


def test_a_pair_that_is_not_valid_is_refused_before_the_first_job(tmp_path: Path) -> None:
    words = ["experiment=demo", "optimizer=mezo,adamw", "objective.loss=cross_entropy,accuracy"]
    line = error_line(mezo("train", "-m", *words, f"hydra.sweep.dir={tmp_path / 'sweep'}"))
    assert line.startswith(
        "error: job 4 of 4 (optimizer=adamw objective.loss=accuracy): objective.loss=accuracy has no"
    )
    assert not (tmp_path / "sweep").exists()


def test_jobs_may_not_share_a_directory(tmp_path: Path) -> None:
    words = ["-m", "experiment=demo", "seed=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert "the directory of another job" in error_line(mezo("train", *words, "hydra.sweep.subdir=${task.name}"))
    assert "does not resolve" in error_line(mezo("train", *words, "hydra.sweep.subdir=${nope}"))
    where = f"hydra.sweep.dir={tmp_path}/${{seed}}"
    assert "a sweep has one directory" in error_line(mezo("train", "-m", "experiment=demo", "seed=1,2", where))
    assert "takes one folder" in error_line(mezo("train", *words, "hydra.sweep.subdir=a,b"))
    assert not (tmp_path / "sweep").exists()


# --- going on ---


def test_sweep_json_names_every_job_before_the_first_one_starts(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(loop, "train", lambda *_: seen.append(json.loads((tmp_path / "s/sweep.json").read_text())))
    subdir = "hydra.sweep.subdir=${seed}-${hydra.job.override_dirname}"
    words = sweep(roberta, movies, tmp_path / "s", "seed=1,2", "task=glob(sst2)", subdir)
    mezo("train", *words)
    assert [job["number"] for job in seen[0]["jobs"]] == [0, 1]
    assert [job["overrides"][-2:] for job in seen[0]["jobs"]] == [["seed=1", "task=sst2"], ["seed=2", "task=sst2"]]
    assert seen[0]["argv"] == ["mezo", "train", *words]
    for job in seen[0]["jobs"]:
        assert (tmp_path / "s" / job["directory"] / "config.yaml").is_file()
    assert len([path for path in (tmp_path / "s").iterdir() if path.is_dir()]) == 2


@pytest.mark.slow
def test_a_killed_sweep_ends_in_the_same_bits(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a job; then one job's directory is gone, another killed before its run.json."""
    more = ["seed=1,2,3", "steps=20", "eval_every=10", "log_every=1"]
    assert mezo("train", *sweep(roberta, movies, tmp_path / "whole", *more)).code == 0
    words = sweep(roberta, movies, tmp_path / "cut", *more)
    with stopped_at(tmp_path / "cut" / "1", 3, "train", *words, cwd=tmp_path) as process:
        process.kill()
    assert statuses(tmp_path / "cut") == {"0": "finished", "1": "interrupted"}
    first = (tmp_path / "cut" / "0" / "run.json").read_bytes()
    (tmp_path / "cut" / "2").mkdir()
    shutil.copy(tmp_path / "whole" / "2" / "config.yaml", tmp_path / "cut" / "2")
    (tmp_path / "cut" / "2" / "train.log").touch()
    said = mezo("resume", tmp_path / "cut")
    assert said.code == 0, said
    assert "job 1 of 3  seed=1" in said.out
    assert said.out.count("finished before: skipped") == 1
    assert "3 of 3 jobs finished" in said.out
    assert (tmp_path / "cut" / "0" / "run.json").read_bytes() == first
    for number in range(3):
        for name in ("trajectory.bin", "checkpoints/last/model.safetensors", "checkpoints/best/model.safetensors"):
            one, other = ((tmp_path / folder / str(number) / name).read_bytes() for folder in ("whole", "cut"))
            assert one == other, (number, name)


@pytest.mark.slow
def test_failed_jobs_run_again_only_when_asked(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Mezo.step
    broken = {2}

    def crash(self: Mezo, *args: Any) -> Any:
        if self.seed in broken:
            raise RuntimeError("the disk is gone")
        return step(self, *args)

    monkeypatch.setattr(Mezo, "step", crash)
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2")
    assert mezo("train", *words).code == 1
    broken.clear()
    for again in (["train", *words], ["resume", tmp_path / "sweep"]):
        said = mezo(*again)
        assert said.code == 1
        assert "failed before: skipped" in said.out
        assert said.err == "failed: job 2 (seed=2): RuntimeError: the disk is gone\n"
    said = mezo("resume", tmp_path / "sweep", "--retry-failed")
    assert (said.code, said.err) == (0, ""), said
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "finished"}
    assert "needs a sweep" in error_line(mezo("train", "--retry-failed", "steps=1"))
    assert "is no sweep" in error_line(mezo("resume", tmp_path / "sweep" / "0", "--retry-failed"))


def test_another_grid_is_refused(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2")
    assert mezo("train", *words).code == 0
    before = files(tmp_path)
    for grid, part in (("seed=1,3", "do not include"), ("seed=1", "do not include"), ("seed=1,2,3", "do not include")):
        line = error_line(mezo("train", *sweep(roberta, movies, tmp_path / "sweep", grid)))
        assert "contains a sweep over another grid" in line or "other settings" in line
        assert part in line or "jobs, not" in line
    assert files(tmp_path) == before
    same = sweep(roberta, movies, tmp_path / "sweep", "seed=range(1,3)")
    assert mezo("train", *same).code == 0


@pytest.mark.slow
def test_settings_that_changed_in_a_file_are_refused(roberta: Path, movies: Path, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 1,2\n")
    words = [*sweep(roberta, movies, tmp_path / "sweep", "experiment=mine"), "--config-dir", tmp_path / "conf"]
    assert mezo("train", *words).code == 0
    file.write_text(f"{file.read_text()}optimizer:\n  eps: 0.01\n")
    assert "sweep/0 contains a run with other settings" in error_line(mezo("resume", tmp_path / "sweep"))


@pytest.mark.slow
def test_it_goes_on_from_another_working_directory(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2", "data.dir=movies")
    assert mezo("train", *words).code == 0
    shutil.rmtree(tmp_path / "sweep" / "1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sweep").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert mezo("resume", "moved").code == 0
    assert statuses(tmp_path / "elsewhere" / "moved") == {"0": "finished", "1": "finished"}


# --- Ctrl-C ---


def test_ctrl_c_stops_the_sweep_and_says_what_is_left(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = loop.train

    def interrupted(config: Any, *args: Any) -> Any:
        if config.seed == 2:
            raise KeyboardInterrupt
        return train(config, *args)

    monkeypatch.setattr(loop, "train", interrupted)
    said = mezo("train", *sweep(roberta, movies, tmp_path / "sweep", "seed=1,2,3"))
    assert (said.code, said.err) == (130, "error: interrupted\n")
    assert said.out.endswith("2 jobs are left; go on with: mezo resume sweep\n")
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "interrupted"}
    monkeypatch.setattr(loop, "train", train)
    assert mezo("resume", "sweep").code == 0
    assert set(statuses(tmp_path / "sweep").values()) == {"finished"}


@pytest.mark.slow
def test_a_real_ctrl_c_ends_the_job_in_hand(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2", "steps=20", "eval_every=0")
    with stopped_at(tmp_path / "sweep" / "0", 2, "train", *words, cwd=tmp_path) as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "error: interrupted\n")
    assert "2 jobs are left; go on with: mezo resume sweep" in out
    assert statuses(tmp_path / "sweep") == {"0": "interrupted"}


# --- other sweepers and launchers ---


SWEEPER = """
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

scores = []


class HalvingSweeper(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        fixed = [word for word in arguments if not word.startswith("optimizer.lr=")]
        for number, lr in enumerate(("1e-2", "5e-3", "-1")):
            (job,) = self.launcher.launch([[*fixed, f"optimizer.lr={lr}"]], initial_job_idx=number)
            scores.append(job.return_value)
"""


@pytest.fixture
def adaptive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sweeper that proposes jobs itself, installed under the name of Hydra's plug-in for Optuna."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "hydra_optuna_sweeper.py").write_text(SWEEPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("hydra_plugins.hydra_optuna_sweeper")
    Plugins.instance().register(module.HalvingSweeper)
    node = {"_target_": "hydra_plugins.hydra_optuna_sweeper.HalvingSweeper"}
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=node)
    return module


def test_an_adaptive_sweeper_gets_scores_and_each_job_is_validated_when_it_is_proposed(
    adaptive: Any, roberta: Path, movies: Path, tmp_path: Path
) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "hydra/sweeper=optuna", "optimizer.lr=interval(1e-3,1e-2)")
    said = mezo("train", *words)
    assert said.code == 0, said
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"] is None
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "finished"}
    wanted = [Run(tmp_path / "sweep" / str(n)).read_summary()["dev"]["accuracy"] for n in range(2)]
    assert adaptive.scores[:2] == wanted
    assert adaptive.scores[2] != adaptive.scores[2]  # NaN: the job failed
    assert "job 3 failed: optimizer.lr=-1" in said.out


def test_the_job_function_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(sweeping.run_job)) is sweeping.run_job


def test_there_is_one_model_at_a_time(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks and modules refer to each other: a large model could stay in memory with the next one, or with the best."""
    alive = count_live(monkeypatch)
    # at lr 0 the first evaluation is the best
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2", "optimizer.lr=0")
    assert mezo("train", *words).code == 0
    assert alive == [0, 0, 0, 0]
