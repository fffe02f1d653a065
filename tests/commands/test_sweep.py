"""`mezo train -m`: each job has its own directory and its own failure; a sweep that was stopped can go on."""

import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from mezo_cli import runs
from mezo_cli.optim.mezo import Mezo
from mezo_cli.runs import Run
from mezo_cli.training import loop
from tests import tiny
from tests.command_line import Result, error_line, mezo, stopped_at
from tests.commands.sweeps import statuses, sweep
from tests.live_models import count_live

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def files(folder: Path) -> dict[Path, bytes]:
    """Every file of a sweep's runs."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent != folder}


@pytest.fixture(scope="module")
def done(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], Result]:
    """A finished sweep of two seeds and two learning rates, its words, and what it printed."""
    folder = tmp_path_factory.mktemp("done")
    words = [
        "seed=13,42",
        *sweep(roberta, tiny.movie_folder(folder / "movies"), folder / "sweep", "optimizer.lr=1e-2,1e-3"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        return folder / "sweep", words, mezo("train", *words)


def test_a_sweep_gives_each_job_a_directory(done: tuple[Path, list[str], Result]) -> None:
    folder, _, said = done
    assert said.code == 0, said
    assert statuses(folder) == dict.fromkeys("0123", "finished")
    texts = [(r.path / "config.yaml").read_text() for r in runs.find_runs(folder)]
    pairs = {re.search(r"lr: (\S+).*\nseed: (\d+)", text, re.S).groups() for text in texts}  # type: ignore[union-attr]
    assert pairs == {("0.01", "13"), ("0.01", "42"), ("0.001", "13"), ("0.001", "42")}
    assert "job 4 of 4  seed=42 optimizer.lr=0.001" in said.out
    assert "4 of 4 jobs finished" in said.out


def test_a_finished_sweep_is_left_as_it_is(done: tuple[Path, list[str], Result]) -> None:
    folder, words, _ = done
    before = files(folder)
    same = [word.replace("seed=13,42", "seed=range(13,43,29)") for word in words]
    assert mezo("train", "-q", *same) == Result(0, f"{folder}\n", "")
    said = mezo("resume", folder)
    assert said.code == 0, said
    assert said.out.count("finished before: skipped") == 4
    assert "4 of 4 jobs finished" in said.out
    for grid in ("seed=13,43", "seed=13"):
        line = error_line(mezo("train", grid, *words[1:]))
        assert f"{folder} contains a sweep over another grid" in line
    assert files(folder) == before


@pytest.mark.slow
def test_a_job_fails_alone_and_runs_again_only_when_asked(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing model, and a crash."""
    step, broken = Mezo.step, {2}

    def crash(self: Mezo, *args: Any) -> Any:
        if self.seed in broken:
            raise RuntimeError("the machine\nsneezed")
        return step(self, *args)

    monkeypatch.setattr(Mezo, "step", crash)
    words = [word for word in sweep("x", movies, tmp_path / "s", "seed=1,2") if not word.startswith("model.path")]
    words += [f"model.path={tmp_path}/none,{roberta}"]
    said = mezo("train", *words)
    assert said.code == 1
    ends = {str(n): Run(tmp_path / "s" / str(n)).info() for n in range(4)}
    assert [n for n, info in ends.items() if info["status"] == "finished"] == ["1"]
    assert {info["status"] for n, info in ends.items() if n != "1"} == {"failed"}
    log = (tmp_path / "s" / "3" / "train.log").read_text()
    assert "Traceback" in log
    assert "sneezed" in log
    for text in (ends["0"]["error"], (tmp_path / "s" / "0" / "train.log").read_text(), said.err):
        assert f"model.path={tmp_path}/none" in text
    assert said.err.startswith("failed: job 1 (")
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 3
    assert "1 of 4 jobs finished" in said.out
    broken.clear()
    said = mezo("resume", tmp_path / "s")
    assert said.code == 1
    assert said.out.count("failed before: skipped") == 3
    assert mezo("resume", tmp_path / "s", "--retry-failed").code == 1
    assert [n for n, status in statuses(tmp_path / "s").items() if status == "finished"] == ["1", "3"]


# --- what is not valid starts nothing ---


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["seed=1,2", "batch_size=8,0"], ["batch_size=0"]),
        (["seed=1,2", "hydra.sweep.subdir=${task.name}"], ["the directory of another job"]),
        (["seed=1,2", "hydra.sweep.subdir=${nope}"], ["does not resolve"]),
        (["seed=1,2", "hydra.sweep.subdir=a,b"], ["hydra.sweep.subdir takes one"]),
        (["seed=1,2", "hydra.sweep.dir=./${seed}"], ["a sweep has one directory"]),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], parts: list[str], tmp_path: Path) -> None:
    own = [] if words[-1].startswith("hydra.sweep.dir") else ["hydra.sweep.dir=sweep"]
    line = error_line(mezo("train", "-m", "experiment=demo", *words, *own))
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


def test_flags_of_a_sweep_are_refused_elsewhere(done: tuple[Path, list[str], Result]) -> None:
    for flag in ("--retry-failed", "--gpus-per-job=1"):
        assert flag.partition("=")[0] in error_line(mezo("train", flag, "steps=1"))
    assert "--retry-failed" in error_line(mezo("resume", done[0] / "0", "--retry-failed"))


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
def test_a_killed_sweep_ends_bitwise_identical(roberta: Path, movies: Path, tmp_path: Path) -> None:
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
    assert said.out.count("finished before: skipped") == 1
    assert "3 of 3 jobs finished" in said.out
    assert (tmp_path / "cut" / "0" / "run.json").read_bytes() == first
    for number in range(3):
        for name in ("trajectory.bin", "checkpoints/last/model.safetensors", "checkpoints/best/model.safetensors"):
            one, other = ((tmp_path / folder / str(number) / name).read_bytes() for folder in ("whole", "cut"))
            assert one == other, (number, name)


@pytest.mark.slow
def test_it_goes_on_elsewhere_unless_a_file_has_changed(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another working directory, in a folder that was moved; a grid of the user's own experiment file."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 1,2\n")
    words = [*sweep(roberta, movies, tmp_path / "sweep", "experiment=mine", "data.dir=movies"), "--config-dir", "conf"]
    assert mezo("train", *words).code == 0
    shutil.rmtree(tmp_path / "sweep" / "1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sweep").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "give it again, --config-dir DIR" in error_line(mezo("resume", "moved"))
    assert mezo("resume", "moved", "--config-dir", tmp_path / "conf").code == 0
    assert statuses(tmp_path / "elsewhere" / "moved") == {"0": "finished", "1": "finished"}
    file.write_text(f"{file.read_text()}optimizer:\n  eps: 0.01\n")
    again = mezo("resume", "moved", "--config-dir", tmp_path / "conf")
    assert "moved/0 contains a run with other settings" in error_line(again)


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
    assert said.out.endswith("2 jobs are left; continue with: mezo resume sweep\n")
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "interrupted"}
    monkeypatch.setattr(loop, "train", train)
    assert mezo("resume", "sweep").code == 0
    assert set(statuses(tmp_path / "sweep").values()) == {"finished"}


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


def test_there_is_one_model_at_a_time(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks and modules refer to each other: a large model could stay in memory with the next one, or with the best."""
    alive = count_live(monkeypatch)
    # at lr 0 the first evaluation is the best
    words = sweep(roberta, movies, tmp_path / "sweep", "seed=1,2", "optimizer.lr=0")
    assert mezo("train", *words).code == 0
    assert alive == [0, 0, 0, 0]
