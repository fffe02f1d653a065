"""Sweeps whose jobs run in other processes: joblib, submitit, Slurm, ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mezo_cli.commands import sweep_submitit
from mezo_cli.commands.sweep_gpus import gpu_slots, plan_gpus
from mezo_cli.commands.sweep_workers import as_worker
from mezo_cli.config import overrides
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, sweep_record
from mezo_cli.training import loop
from tests import slurm
from tests.command_line import environment, error_line, mezo, process, start
from tests.commands import sweeps
from tests.commands.sweeps import statuses, wait_until_it_trains

TIMEOUT = 300
NEVER_ENDS = ("steps=100000", "eval_every=0", "optimizer.lr=1e-6")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not overrides.is_installed(package), reason=f"needs {package}")


joblib_is_there, submitit_is_there = needs("hydra-joblib-launcher"), needs("hydra-submitit-launcher")


pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def sweep(model: Any, movies: Path, folder: Path, launcher: str, *more: str) -> list[str]:
    return sweeps.sweep(model, movies, folder, "model.device=cpu", f"hydra/launcher={launcher}", *more)


@pytest.fixture
def workers() -> Iterator[None]:
    """End the processes that joblib keeps for the next sweep."""
    yield
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True, kill_workers=True)


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
    infos = [Run(tmp_path / "sweep" / name).info() for name in "01"]
    assert os.getpid() not in {info["pid"] for info in infos}
    assert {info["cuda_visible_devices"] for info in infos} <= {"4,5", "6,7"}
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
    infos = [Run(tmp_path / "sweep" / name).info() for name in "01"]
    assert len({os.getpid(), *(info["pid"] for info in infos)}) == 3
    assert {info["cuda_visible_devices"] for info in infos} <= {"3", "4"}
    words = sweep(roberta, movies, tmp_path / "all", "submitit_local", "seed=1")
    assert mezo("train", *words).code == 0
    assert Run(tmp_path / "all" / "0").info()["cuda_visible_devices"] == "3,4"
    (results,) = (tmp_path / "all" / ".submitit").rglob("*_result.pkl")  # where nobody could have put one before
    assert len(results.relative_to(tmp_path / "all" / ".submitit").parts) == 3


@pytest.mark.slow
@joblib_is_there
def test_a_sweep_goes_on_with_another_launcher_bitwise_identical(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job at a time runs in this process, so this is quick; Ctrl-C ends the job in hand and the sweep."""
    assert mezo("train", *sweep(roberta, movies, tmp_path / "whole", "basic", "seed=1,2,3")).code == 0
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
    assert said.out.endswith("2 jobs are left; continue with: mezo resume cut\n")
    assert statuses(tmp_path / "cut") == {"0": "finished", "1": "interrupted"}
    monkeypatch.setattr(loop, "train", train)
    again = mezo("train", *sweep(roberta, movies, tmp_path / "cut", "basic", "seed=1,2,3"))
    assert again.code == 0, again
    assert again.out.count("finished before: skipped") == 1
    stored = sweep_record.read(tmp_path / "cut").overrides
    assert [text for text in stored if "hydra" in text] == ["hydra/launcher=basic"]
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
    os.kill(wait_until_it_trains(folder, running).info()["pid"], signal.SIGKILL)
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 1, (out, err)
    assert "a process of the sweep ended before its job" in out
    assert "continue with: mezo resume sweep" in out
    assert "interrupted\n" in err
    assert "Traceback" not in out + err
    assert "interrupted" in statuses(folder).values()
    assert "running" not in statuses(folder).values()
    said = process("resume", folder, cwd=tmp_path, timeout=TIMEOUT)
    assert (said.code, said.err) == (0, ""), said
    assert set(statuses(folder).values()) == {"finished"}


@pytest.mark.slow
@joblib_is_there
@submitit_is_there
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_ctrl_c_in_a_terminal_ends_the_jobs_in_hand(launcher: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    """Every process of the group gets SIGINT, as from a terminal."""
    folder = tmp_path / "sweep"
    words = sweep(roberta, movies, folder, launcher, "seed=1,2,3", *NEVER_ENDS)
    code = "import os, sys; os.setsid(); os.execv(sys.executable, [sys.executable, '-m', 'mezo_cli', *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "train", *map(str, words)]
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True)
    wait_until_it_trains(folder, running)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130, (out, err)
    assert out.endswith("3 jobs are left; continue with: mezo resume sweep\n")
    assert err.splitlines()[-1] == "error: interrupted"
    # recorded, not only found out
    recorded = [json.loads(path.read_text())["status"] for path in folder.glob("*/run.json")]
    assert recorded
    assert set(recorded) == {"interrupted"}


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


# --- Slurm: one node in a temporary folder; skipped with a message where it is not installed ---


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    why_not = slurm.why_not()
    if why_not is None and not overrides.is_installed("hydra-submitit-launcher"):
        why_not = "needs hydra-submitit-launcher"
    if why_not is not None:
        pytest.skip(why_not)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.mark.slow
def test_slurm_runs_the_jobs_of_a_sweep(cluster: dict[str, str], roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "submitit_slurm", "optimizer.lr=1e-2,1e30")
    said = process("train", *words, cwd=tmp_path, timeout=TIMEOUT, **cluster)
    assert said.code == 1, said
    assert said.err.splitlines()[-1].startswith("failed: job 2 (optimizer.lr=1e+30): ")
    assert "1 of 2 jobs finished" in said.out
    assert "MeZO" in said.out
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "failed"}


@pytest.mark.slow
def test_a_job_that_slurm_lost_is_interrupted_and_resumed(
    cluster: dict[str, str], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    """This cluster has no accounting: that a job has no result is seen in the queue."""
    folder, more = tmp_path / "sweep", ("steps=40", "eval_every=0", "log_every=1", "seed=1")
    words = sweep(roberta, movies, folder, "submitit_slurm", *more)
    running = start("train", *words, cwd=tmp_path, **cluster)
    os.kill(wait_until_it_trains(folder, running).info()["pid"], signal.SIGKILL)
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 1, (out, err)
    assert "failed: job 1: interrupted" in err
    assert statuses(folder) == {"0": "interrupted"}
    assert process("resume", folder, cwd=tmp_path, timeout=TIMEOUT, **cluster).code == 0
    assert statuses(folder) == {"0": "finished"}


@pytest.mark.slow
def test_ctrl_c_cancels_what_slurm_has_not_started(
    cluster: dict[str, str], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    folder, one = tmp_path / "sweep", f"hydra.launcher.cpus_per_task={os.cpu_count()}"
    words = sweep(roberta, movies, folder, "submitit_slurm", one, *NEVER_ENDS, "seed=1,2")
    running = start("train", *words, cwd=tmp_path, **cluster)
    wait_until_it_trains(folder, running)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130, (out, err)
    assert "2 jobs are left; continue with: mezo resume sweep" in out
    assert statuses(folder) == {"0": "interrupted"}


def test_a_job_is_over_when_it_has_a_result_or_has_left_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue, queue, now = tmp_path / "squeue", sweep_submitit.SlurmQueue(), 100.0
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sweep_submitit, "time", SimpleNamespace(monotonic=lambda: now))
    result = tmp_path / "result.pkl"
    job: Any = SimpleNamespace(job_id="7_1", paths=SimpleNamespace(result_pickle=result))
    squeue.write_text("#!/bin/sh\nexit 1\n")
    squeue.chmod(0o755)
    assert not queue.is_over(job)  # the controller does not answer
    now += 10
    squeue.write_text("#!/bin/sh\necho 7_0; echo 7_1\n")
    assert not queue.is_over(job)
    squeue.write_text("#!/bin/sh\necho 7_0\n")
    assert not queue.is_over(job)  # asked at most every five seconds
    now += 10
    assert queue.is_over(job)
    squeue.write_text("#!/bin/sh\necho 7_1\n")
    now += 10
    assert not queue.is_over(job)
    result.touch()
    assert queue.is_over(job)


# --- ray ---


@pytest.mark.slow
def test_ray_runs_the_jobs_of_a_sweep(roberta: Path, movies: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install hydra-ray-launcher -c constraints-ray.txt")
    if not overrides.is_installed("hydra-ray-launcher"):
        pytest.skip("needs hydra-ray-launcher: constraints-ray.txt")
    variables = {"RAY_AUTH_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "0,1"}  # no token in the home folder
    more = ("+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.num_gpus=2", "optimizer.lr=1e-2,1e30")
    words = sweep(roberta, movies, tmp_path / "sweep", "ray", *more)
    said = process("train", *words, "--gpus-per-job", "1", cwd=tmp_path, timeout=TIMEOUT, **variables)
    assert said.code == 1, said
    assert said.err.splitlines()[-1].startswith("failed: job 2 (optimizer.lr=1e+30): ")
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "failed"}
    assert {Run(tmp_path / "sweep" / name).info()["cuda_visible_devices"] for name in "01"} <= {"0", "1"}


# --- GPUs ---

CLAIM = """
import sys
from pathlib import Path
from mezo_cli.commands import sweep_gpus
folder, values = Path(sys.argv[1]), sys.argv[2:]
value = sweep_gpus.claim(folder, values)
assert sweep_gpus.claim(folder, values) == value
print(value, flush=True)
sys.stdin.read()
"""


def test_each_process_has_a_slot_of_its_own_until_it_ends(tmp_path: Path) -> None:
    values = gpu_slots(["a", "b", "c", "d", "e"], 2)
    assert values == ["a,b", "c,d"]
    command, pipe = [sys.executable, "-c", CLAIM, str(tmp_path), *values], subprocess.PIPE
    holders = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment(), text=True) for _ in range(2)]
    try:
        assert {holder.stdout.readline() for holder in holders} == {"a,b\n", "c,d\n"}  # type: ignore[union-attr]
        holders.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment(), text=True))
        time.sleep(1)  # it waits
        holders[0].communicate()
        assert holders[2].communicate()[0] in ("a,b\n", "c,d\n")
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_gpus_of_schedulers_are_asked_for_by_their_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_gpus(None, "joblib", []) == ([], [])
    assert plan_gpus(2, "submitit_slurm", []) == ([], ["++hydra.launcher.gpus_per_node=2"])
    assert plan_gpus(1, "ray", []) == ([], ["++hydra.launcher.ray.remote.num_gpus=1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1, GPU-2,-1,GPU-3")
    assert plan_gpus(1, "basic", []) == (["GPU-1", "GPU-2"], [])
    assert plan_gpus(1, "joblib", []) == (["GPU-1", "GPU-2"], ["hydra.launcher.n_jobs=2"])
    assert plan_gpus(1, "joblib", ["hydra.launcher.n_jobs=1"])[1] == ["hydra.launcher.n_jobs=1"]
    for launcher, given in (
        ("joblib", "hydra.launcher.n_jobs=-1"),
        ("submitit_local", "+hydra.launcher.gpus_per_node=1"),
    ):
        with pytest.raises(UserError, match=given.lstrip("+")):
            plan_gpus(1, launcher, [given])
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


@pytest.mark.parametrize(
    ("gpus", "per_job", "part"), [("", "1", "has 0 GPUs"), ("", "0", "give 1 or more"), ("0,1", "3", "has 2 GPUs")]
)
def test_too_few_gpus(gpus: str, per_job: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    line = error_line(mezo("train", "-m", "experiment=demo", "seed=1,2", "--gpus-per-job", per_job))
    assert f"--gpus-per-job {per_job}" in line
    assert part in line


@joblib_is_there
@pytest.mark.parametrize("setting", ["n_jobs=0", "n_jobs=many", "nosuch=1"])
def test_settings_that_joblib_refuses(setting: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "joblib", "seed=1,2")
    assert setting.partition("=")[0] in error_line(mezo("train", *words, f"hydra.launcher.{setting}"))


@submitit_is_there
def test_slurm_that_is_not_there(roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = error_line(mezo("train", *sweep(roberta, movies, tmp_path / "sweep", "submitit_slurm", "seed=1,2")))
    assert line.startswith("error: hydra/launcher=submitit_slurm: ")
    assert "slurm" in line.partition(": ")[2]
    assert statuses(tmp_path / "sweep") == {}
