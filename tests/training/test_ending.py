"""When a run ends: more steps, `max_seconds`, `patience`, divergence; full checkpoints that are pruned."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mezo_cli.commands.resume import with_new_end
from mezo_cli.config.stored import read_config
from mezo_cli.optim.mezo import Mezo
from mezo_cli.runs import Run, recovery, trajectory
from mezo_cli.training import loop
from tests import tiny
from tests.command_line import error_line, mezo, ok, small
from tests.interruption import interrupted_at
from tests.training.test_resume import state

pytestmark = pytest.mark.usefixtures("eager_kernels")

MODES = {
    "full": [],
    "trajectory": ["checkpoint=trajectory"],
    "momentum": ["optimizer=mezo_momentum", "optimizer.lr=1e-3"],
    "adamw": ["optimizer=adamw", "optimizer.schedule=constant"],
}
EACH_STEP = ["eval_every=1", "log_every=1", "optimizer.lr=0"]  # no evaluation is better than the first

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ending")
    tiny.movie_folder(folder / "movies")
    return folder


@pytest.fixture(scope="module")
def train(home: Path, roberta: Path) -> Train:
    """Return a function that trains a run once and returns a directory; with `copy`, a copy of it."""

    def run(*more: str, copy: str = "", code: int = 0) -> Path:
        path = home / hashlib.sha256("".join(more).encode()).hexdigest()[:12]
        if not path.exists():
            result = mezo("train", *small(roberta, home / "movies", path, *more))
            assert result.code == code, result
        if copy:
            shutil.copytree(path, home / copy)
            return home / copy
        return path

    return run


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def result(run: Path) -> dict[str, Any]:
    """Return what a run came to, without what its interruptions leave."""
    return {key: value for key, value in state(run).items() if key != "names"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_given_more_steps_is_the_run_that_had_them(mode: str, train: Train) -> None:
    words = [*MODES[mode], "log_every=3"]
    whole, run = train(*words), train(*words, "steps=3", copy=f"more {mode}")
    assert mezo("resume", run, "steps=6").code == 0
    assert result(run) == result(whole)
    assert (run / "config.yaml").read_bytes() == (whole / "config.yaml").read_bytes()
    (change,) = Run.open(run).info()["changes"]
    assert (change["before"], change["after"]) == ({"steps": 3}, {"steps": 6})
    assert (run / "summary-3.json").exists()
    assert (run / "predictions-3.jsonl").exists()
    assert (run / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    assert "is finished: there is nothing to resume" in mezo("resume", run, "steps=6").out


def test_more_steps_leave_the_lines_at_the_number_that_null_stood_for(train: Train) -> None:
    run = Run.open(train("log_every=null", "steps=3", "checkpoint=trajectory"))
    config = read_config(run.path / "config.yaml")
    assert with_new_end(run, config, ["steps=1500"]).log_every is None  # 1 still
    assert with_new_end(run, config, ["steps=20000"]).log_every == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("stop", [3, 5, 6])  # the first calls are those of claiming the run and its status
def test_a_change_of_the_config_can_be_interrupted_anywhere(stop: int, train: Train) -> None:
    words = ["checkpoint=trajectory", "log_every=3"]
    whole, run = train(*words), train(*words, "steps=3", copy=f"cut {stop}")
    with interrupted_at(recovery.os, "replace", stop):
        assert mezo("resume", run, "steps=6").code == 130
    assert Run.open(run).status() == "interrupted"
    assert mezo("resume", run, "steps=6").code == 0
    assert result(run) == result(whole)


@pytest.mark.parametrize(
    ("setting", "change", "line"),
    [
        ("optimizer.schedule=linear", "steps=6", "with optimizer.schedule=linear every step depends on steps=3"),
        ("optimizer.sample_schedule=linear", "steps=6", "with optimizer.sample_schedule=linear every step depends"),
        ("log_every=1", "steps=2", "has steps=3, which can only be raised"),
        ("log_every=1", "steps=many", "steps=many: allowed is a whole number"),
        ("log_every=1", "step=6", "a resumed run keeps its settings, except when it ends: steps=..., patience=..."),
        ("log_every=1", "optimizer.lr=1", "a resumed run keeps its settings"),
        ("log_every=1", "patience=0", "patience=0: out of range"),
    ],
)
def test_other_changes_are_refused(setting: str, change: str, line: str, train: Train) -> None:
    run = train(setting, "steps=3", "checkpoint=trajectory")
    before = files(run)
    assert line in error_line(mezo("resume", run, change))
    assert files(run) == before


def test_patience_ends_a_run(train: Train) -> None:
    run, whole = train(*EACH_STEP, "patience=2", copy="patient"), train(*EACH_STEP)
    summary = Run(run).read_summary()
    assert (summary["steps"], summary["best"]["step"], summary["stopped"]) == (2, 0, "patience")
    assert Run(run).info()["stopped"] == {"by": "patience", "step": 2}
    assert (
        "stopped by patience=2 at step 2 of 6: the best dev score is that of step 0" in (run / "train.log").read_text()
    )
    assert summary["verdict"] == "not_improved"
    listed = mezo("runs", run).out
    assert "2/6" in listed
    assert "@0: step 0 was picked, the model before training" in listed
    assert "is finished (stopped by patience at step 2): there is nothing" in mezo("resume", run).out
    assert "was stopped by patience=2: give patience=null, or a higher" in error_line(mezo("resume", run, "patience=1"))
    shutil.rmtree(run / "checkpoints")  # the last step is known without them
    assert mezo("eval", run, "--checkpoint", "last").code == 0
    assert mezo("compare", run).code == 0
    assert mezo("resume", run, "patience=3").code == 0
    assert Run(run).read_summary()["steps"] == 3
    assert mezo("resume", run, "patience=null").code == 0
    assert Run(run).read_summary() | {"seconds": 0, "peak_memory_bytes": 0} == Run(whole).read_summary() | {
        "seconds": 0,
        "peak_memory_bytes": 0,
    }
    assert (run / "trajectory.bin").read_bytes() == (whole / "trajectory.bin").read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["trajectory", "adamw"])
def test_max_seconds_stops_a_run_that_goes_on_later(mode: str, train: Train) -> None:
    whole = train(*MODES[mode])
    run = train(*MODES[mode], "max_seconds=1e-9", code=130, copy=f"limited {mode}")  # each process takes one step
    assert Run(run).info()["stopped"] == {"by": "max_seconds", "step": 1}
    assert not (run / "summary.json").exists()
    ends = []
    while Run(run).status() == "interrupted" and len(ends) < 6:
        ends.append(mezo("resume", run))
    assert [end.code for end in ends] == [130, 130, 130, 130, 0]
    assert ends[0].err == "stopped after max_seconds=1e-09 at step 2 of 6\n"
    assert "resume with: mezo resume" in ends[0].out
    assert Run(run).info()["stopped"] is None
    assert result(run) == result(whole)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["trajectory", "adamw"])
def test_a_limit_may_end_a_run_with_a_result(mode: str, train: Train) -> None:
    words = [*MODES[mode], "eval_every=3"]
    run, whole = train(*words, "max_seconds=1e-9", "at_limit=finish", copy=f"finished {mode}"), train(*words)
    summary = Run(run).read_summary()
    assert (Run(run).status(), summary["steps"], summary["stopped"]) == ("finished", 1, "max_seconds")
    assert [line["step"] for line in Run(run).evaluations("dev")] == [0, 1]  # one more than eval_every asks for
    assert (summary["test"] is not None, summary["best"]["step"] in (0, 1)) == (True, True)
    assert mezo("eval", run, "--checkpoint", "last").code == 0
    assert "is finished (stopped by max_seconds at step 1): there is nothing" in mezo("resume", run).out
    assert mezo("resume", run, "max_seconds=1e-9").code == 0  # the same again: each process has its own
    assert (Run(run).read_summary()["steps"], (run / "summary-1.json").exists()) == (2, True)
    assert mezo("resume", run, "at_limit=stop").code == 130
    assert mezo("resume", run, "max_seconds=null").code == 0
    assert [line["step"] for line in Run(run).evaluations("dev")] == [0, 1, 2, 3, 6]
    for name in ("trajectory.bin",) if mode == "trajectory" else ("checkpoints/last/model.safetensors",):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    assert mezo("compare", run, whole).code == 0


def test_the_first_step_of_a_process_does_not_count(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, now = Mezo.step, [0.0]
    took = iter([100.0, *[1.0] * 5])

    def step(*words: Any) -> Any:
        now[0] += next(took)
        return plain(*words)

    monkeypatch.setattr(Mezo, "step", step)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    assert Run(train("max_seconds=3", "at_limit=finish")).read_summary()["steps"] == 4


DIVERGES = ["optimizer.lr=0.05", "log_every=1", "steps=24", "eval_every=4"]  # from step 15 or 19 on, as the CPU rounds


def test_a_run_that_diverged_ends_there_unless_told_otherwise(train: Train) -> None:
    whole, run = train(*DIVERGES, "stop_on_divergence=false"), train(*DIVERGES, copy="diverged")
    log = (whole / "train.log").read_text()
    (step,) = [int(found) for found in re.findall(r"warning: step (\d+): the run has diverged", log)]
    assert 10 < step < 24
    (told,) = re.findall(
        r"warning: step (\d+): the loss on dev, [\d.]+, is above that before training, [\d.]+; try", log
    )
    assert int(told) in range(4, step + 4, 4)
    assert "verdict  diverged: the mean of the last 10 losses is" in log.splitlines()[-2]
    assert (Run(whole).read_summary()["verdict"], Run(whole).read_summary()["steps"]) == ("diverged", 24)
    summary = Run(run).read_summary()
    assert (summary["steps"], summary["stopped"], summary["verdict"]) == (step, "divergence", "diverged")
    assert Run(run).info()["stopped"] == {"by": "divergence", "step": step}
    assert [line["step"] for line in Run(run).evaluations("dev")] == [*range(0, step, 4), step]
    assert summary["test"] is not None
    assert "diverged: give stop_on_divergence=false" in error_line(mezo("resume", run, "steps=29"))
    assert mezo("resume", run, "stop_on_divergence=false").code == 0
    assert (run / "trajectory.bin").read_bytes() == (whole / "trajectory.bin").read_bytes()


def test_pruned_checkpoints_are_replayed(train: Train) -> None:
    run = train(*MODES["momentum"], copy="pruned")
    before = [mezo("eval", run, "--checkpoint", name).out for name in ("best", "last")]
    size = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
    said = ok("prune", run)
    assert f"{size:,} bytes freed" in said.out
    assert not list(run.glob("*checkpoints*"))
    assert Run(run).info()["pruned"]["bytes"] == size
    assert [mezo("eval", run, "--checkpoint", name).out for name in ("best", "last")] == before
    assert "has no full checkpoints" in error_line(mezo("prune", run))


def test_only_what_a_replay_gives_is_pruned(train: Train, home: Path) -> None:
    folder = home / "all"
    for name, words in {"good": [], "other": [], "adamw": MODES["adamw"]}.items():
        train(*words, copy=f"all/{name}")
    stopped = train("max_seconds=1e-9", code=130, copy="all/stopped")

    def change(new: Path) -> None:
        no_sums = shutil.ignore_patterns("mezo.json")
        shutil.copytree(folder / "good" / "checkpoints" / "last", new, ignore=no_sums, dirs_exist_ok=True)
        tensors = load_file(new / "model.safetensors")
        next(iter(tensors.values())).view(-1)[0] += 1
        save_file(tensors, new / "model.safetensors", {"format": "pt"})

    Run(folder / "other").save_checkpoint("last", 6, change)
    assert "mezo.json is damaged: it is not what run.json says" in error_line(mezo("prune", folder / "other"))
    Run(folder / "other").update(ends=Run(folder / "other").ends())
    before = {name: files(folder / name) for name in ("other", "adamw", "stopped")}
    said = mezo("prune", folder)
    assert said.code == 2
    assert "1 of 4 runs could not be pruned" in said.err
    assert not (folder / "good" / "checkpoints").exists()
    assert "gives other weights than checkpoints/last; nothing was removed" in said.out
    assert {name: files(folder / name) for name in before} == before
    assert "optimizer=adamw writes no trajectory" in error_line(mezo("prune", folder / "adamw"))
    assert "is interrupted: only finished runs are pruned" in error_line(mezo("prune", stopped))
    weights = folder / "other" / "checkpoints" / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "is damaged" in error_line(mezo("prune", folder / "other"))
    assert "no such folder" in error_line(mezo("prune", folder / "none"))
    assert len(trajectory.read(folder / "good" / "trajectory.bin")) == 6
