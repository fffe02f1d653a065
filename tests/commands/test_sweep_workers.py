"""Sweeps whose jobs run in other processes: joblib, submitit; what they leave is as with the built-in launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import runs
from mezo_cli.commands.sweep_gpus import plan_gpus
from mezo_cli.commands.sweep_workers import as_worker
from mezo_cli.config import overrides
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, gpu_slots, sweep_record
from mezo_cli.training import loop
from tests.command_line import Result, environment, error_line, mezo, process, small, start


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not overrides.is_installed(package), reason=f"needs {package}")


joblib_is_there, submitit_is_there = needs("hydra-joblib-launcher"), needs("hydra-submitit-launcher")


pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


@pytest.fixture
def workers() -> Iterator[None]:
    """End the processes that joblib keeps for the next sweep."""
    yield
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True, kill_workers=True)


def sweep(model: Any, movies: Path, folder: Path, launcher: str, *more: str) -> list[str]:
    words = [
        word
        for word in small(model, movies, folder, "steps=2", "model.device=cpu", *more)
        if not word.startswith("hydra.run.dir")
    ]
    return ["-m", *words, f"hydra.sweep.dir={folder}", f"hydra/launcher={launcher}"]


def statuses(folder: Path) -> dict[str, str]:
    return {run.path.name: run.status() for run in runs.find_runs(folder)}


def is_training(folder: Path) -> bool:
    """Whether a job of a sweep has made a step."""
    return any('"train"' in path.read_text() for path in folder.glob("*/metrics.jsonl"))


def wait_until_it_trains(folder: Path, running: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return run.json of the first job that makes steps."""
    while not is_training(folder):
        assert running.poll() is None, running.communicate()
        time.sleep(0.1)
    path = next(path for path in sorted(folder.glob("*/metrics.jsonl")) if '"train"' in path.read_text())
    return Run(path.parent).info()


# --- processes of their own ---


@pytest.mark.slow
@joblib_is_there
def test_jobs_run_in_processes_of_their_own_and_fail_alone(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    words = sweep(roberta, movies, tmp_path / "sweep", "joblib", "optimizer.lr=1e-2,1e30")
    said = mezo("train", *words, "--gpus-per-job", "2")
    assert said.code == 1, said
    assert said.err.startswith("failed: job 2 (optimizer.lr=1e+30): ")
    assert said.err.count("\n") == 1
    for line in ("job 1 of 2  optimizer.lr=0.01  finished", "job 2 of 2  optimizer.lr=1e+30  failed: ", "MeZO"):
        assert line in said.out
    assert "1 of 2 jobs finished" in said.out
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "failed"}
    found = [Run(tmp_path / "sweep" / name).info() for name in "01"]
    assert os.getpid() not in {info["pid"] for info in found}
    assert {info["cuda_visible_devices"] for info in found} <= {"4,5", "6,7"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7,8"


@pytest.mark.slow
@submitit_is_there
def test_submitit_runs_each_job_in_a_process_of_its_own(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    words = sweep(roberta, movies, tmp_path / "sweep", "submitit_local", "seed=1,2")
    said = mezo("train", *words, "--gpus-per-job", "1")
    assert said.code == 0, said
    assert "2 of 2 jobs finished" in said.out
    found = [Run(tmp_path / "sweep" / name).info() for name in "01"]
    assert len({os.getpid(), *(info["pid"] for info in found)}) == 3
    assert {info["cuda_visible_devices"] for info in found} <= {"3", "4"}
    words = sweep(roberta, movies, tmp_path / "all", "submitit_local", "seed=1")
    assert mezo("train", *words).code == 0
    assert Run(tmp_path / "all" / "0").info()["cuda_visible_devices"] == "3,4"
    (results,) = (tmp_path / "all" / ".submitit").rglob("*_result.pkl")  # where nobody could have put one before
    assert len(results.relative_to(tmp_path / "all" / ".submitit").parts) == 3


@pytest.mark.slow
@joblib_is_there
def test_a_sweep_goes_on_with_another_launcher_in_the_same_bits(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job at a time runs in this process, so this is quick; Ctrl-C ends the job in hand and the sweep."""
    whole = sweep(roberta, movies, tmp_path / "whole", "basic", "seed=1,2,3")
    assert mezo("train", *whole).code == 0
    train = loop.train

    def interrupted(config: Any, *args: Any) -> Any:
        if config.seed == 2:
            signal.raise_signal(signal.SIGINT)
            for _ in range(600):  # the signal to this job ends it; one that comes just before a sleep waits for its end
                time.sleep(0.1)
        return train(config, *args)

    monkeypatch.setattr(loop, "train", interrupted)
    one = "hydra.launcher.n_jobs=1"
    said = mezo("train", *sweep(roberta, movies, tmp_path / "cut", "joblib", "seed=1,2,3"), one)
    assert (said.code, said.err) == (130, "error: interrupted\n")
    assert said.out.endswith("2 jobs are left; go on with: mezo resume cut\n")
    assert statuses(tmp_path / "cut") == {"0": "finished", "1": "interrupted"}
    monkeypatch.setattr(loop, "train", train)
    assert "hydra/launcher=joblib" in sweep_record.read(tmp_path / "cut").overrides
    again = mezo("train", *sweep(roberta, movies, tmp_path / "cut", "basic", "seed=1,2,3"))
    assert again.code == 0, again
    assert again.out.count("finished before: skipped") == 1
    assert {"hydra/launcher=basic"} == {
        text for text in sweep_record.read(tmp_path / "cut").overrides if "hydra" in text
    }
    for name in "012":
        one_run, other = ((tmp_path / folder / name / "trajectory.bin").read_bytes() for folder in ("whole", "cut"))
        assert one_run == other


# --- kills and Ctrl-C, for real ---


@pytest.mark.slow
@joblib_is_there
@submitit_is_there
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_killed_worker_is_interrupted_and_resumed(launcher: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    words = sweep(roberta, movies, folder, launcher, "seed=1,2", "steps=1000", "eval_every=0", "optimizer.lr=1e-6")
    running = start("train", *words, cwd=tmp_path)
    info = wait_until_it_trains(folder, running)
    os.kill(info["pid"], signal.SIGKILL)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 1, (out, err)
    assert "a process of the sweep ended before its job" in out
    assert "go on with: mezo resume sweep" in out
    assert "interrupted\n" in err
    assert "Traceback" not in out + err
    assert "interrupted" in statuses(folder).values()
    assert "running" not in statuses(folder).values()
    said = process("resume", folder, cwd=tmp_path, timeout=300)
    assert (said.code, said.err) == (0, ""), said
    assert set(statuses(folder).values()) == {"finished"}


@pytest.mark.slow
@joblib_is_there
@submitit_is_there
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_ctrl_c_in_a_terminal_ends_the_jobs_in_hand(launcher: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    """Every process of the group gets SIGINT, as from a terminal."""
    folder = tmp_path / "sweep"
    words = sweep(roberta, movies, folder, launcher, "seed=1,2,3", "steps=100000", "eval_every=0", "optimizer.lr=1e-6")
    code = "import os, sys; os.setsid(); os.execv(sys.executable, [sys.executable, '-m', 'mezo_cli', *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "train", *map(str, words)]
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True)
    wait_until_it_trains(folder, running)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 130, (out, err)
    assert out.endswith("3 jobs are left; go on with: mezo resume sweep\n")
    assert err.splitlines()[-1] == "error: interrupted"
    assert set(statuses(folder).values()) == {"interrupted"}
    trained = [run for run in runs.find_runs(folder) if (run.path / "metrics.jsonl").exists()]
    assert trained
    assert all(run.info()["status"] == "interrupted" for run in trained)  # recorded, not only found out


def test_the_signal_of_submitit_reaches_it_when_the_run_is_recorded() -> None:
    called: list[int] = []
    interrupt, before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda number, _: called.append(number))
    try:
        with as_worker():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGUSR2)
            assert called == []
        assert called == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGUSR2, before)


# --- GPUs ---

CLAIM = """
import sys, time
from pathlib import Path
from mezo_cli.runs import gpu_slots
folder, values = Path(sys.argv[1]), sys.argv[2:]
value = gpu_slots.claim(folder, values)
assert gpu_slots.claim(folder, values) == value
print(value, flush=True)
sys.stdin.read()
"""


def test_each_process_has_a_slot_of_its_own_until_it_ends(tmp_path: Path) -> None:
    values = gpu_slots.slots(["a", "b", "c", "d", "e"], 2)
    assert values == ["a,b", "c,d"]
    command = [sys.executable, "-c", CLAIM, str(tmp_path), *values]
    pipe = subprocess.PIPE
    holders = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment(), text=True) for _ in range(3)]
    try:
        while True:  # two of the three have a slot, the third waits
            got = [path for path in (tmp_path / gpu_slots.FOLDER).glob("*.lock") if _is_locked(path)]
            if len(got) == 2:
                break
            time.sleep(0.05)
        for holder in holders:
            assert holder.stdin is not None
            holder.stdin.close()  # it ends when it has had its slot
        said = [holder.stdout.read().strip() for holder in holders if holder.stdout is not None]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
    assert set(said) == set(values)
    assert len(said) == 3


def _is_locked(path: Path) -> bool:
    import fcntl

    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_gpus_of_schedulers_are_asked_for_by_their_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_gpus(None, "joblib", []) == ([], [])
    assert plan_gpus(2, "submitit_slurm", []) == ([], ["++hydra.launcher.gpus_per_node=2"])
    assert plan_gpus(1, "ray", []) == ([], ["++hydra.launcher.ray.remote.num_gpus=1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1, GPU-2,-1,GPU-3")
    assert plan_gpus(1, "basic", []) == (["GPU-1", "GPU-2"], [])
    assert plan_gpus(1, "joblib", []) == (["GPU-1", "GPU-2"], ["hydra.launcher.n_jobs=2"])
    assert plan_gpus(1, "joblib", ["hydra.launcher.n_jobs=1"])[1] == ["hydra.launcher.n_jobs=1"]
    with pytest.raises(UserError, match=r"give 1 to 2"):
        plan_gpus(1, "joblib", ["hydra.launcher.n_jobs=-1"])
    with pytest.raises(UserError, match="leave one out"):
        plan_gpus(1, "submitit_local", ["+hydra.launcher.gpus_per_node=1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert plan_gpus(3, "basic", []) == (["0,1,2"], [])


def test_the_built_in_launcher_shows_its_process_the_gpus_of_one_job(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    said = mezo("train", *sweep(roberta, movies, tmp_path / "sweep", "basic", "steps=0"), "--gpus-per-job", "2")
    assert said.code == 0, said
    assert Run(tmp_path / "sweep" / "0").info()["cuda_visible_devices"] == "2,3"
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["gpus_per_job"] == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3,5"


# --- mistakes ---


def test_mistakes_end_in_one_line(roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "basic", "seed=1,2")
    assert "CUDA_VISIBLE_DEVICES= has 0 GPUs" in error_line(mezo("train", *words, "--gpus-per-job", "1"))
    assert "give 1 or more" in error_line(mezo("train", *words, "--gpus-per-job", "0"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "--gpus-per-job 3: CUDA_VISIBLE_DEVICES=0,1 has 2" in error_line(
        mezo("train", *words, "--gpus-per-job", "3")
    )
    assert "add -m" in error_line(mezo("train", "steps=1", "--gpus-per-job", "1"))
    monkeypatch.setattr(overrides, "is_installed", lambda _: False)
    packages = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit", "ray": "ray"}
    for launcher, package in packages.items():
        line = error_line(mezo("train", *sweep(roberta, movies, tmp_path / "sweep", launcher)))
        assert f"it is not installed: pip install hydra-{package}-launcher" in line
    assert not (tmp_path / "sweep").exists()


def refused(*words: object) -> Result:
    said = mezo("train", *words)
    error_line(said)
    return said


@joblib_is_there
def test_settings_that_joblib_refuses_end_in_one_line(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "joblib", "seed=1,2")
    assert "hydra/launcher=joblib: " in refused(*words, "hydra.launcher.n_jobs=0").err
    assert "n_jobs" in refused(*words, "hydra.launcher.n_jobs=many").err
    assert "nosuch" in refused(*words, "hydra.launcher.nosuch=1").err


@submitit_is_there
def test_slurm_that_is_not_there_ends_in_one_line(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = refused(*sweep(roberta, movies, tmp_path / "sweep", "submitit_slurm", "seed=1,2")).err
    assert line.startswith("error: hydra/launcher=submitit_slurm: ")
    assert "slurm" in line.partition(": ")[2]
    assert statuses(tmp_path / "sweep") == {}
