"""Sweeps on Slurm (one node in a temporary folder) and on ray: skipped with a message where they are not installed."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mezo_cli import runs
from mezo_cli.commands import slurm_queue
from mezo_cli.config import overrides
from mezo_cli.runs import Run
from tests import slurm
from tests.command_line import process, small, start

TIMEOUT = 300


def sweep(model: Path, movies: Path, folder: Path, *more: str) -> list[str]:
    words = [word for word in small(model, movies, folder, *more) if not word.startswith("hydra.run.dir")]
    return ["train", "-m", *words, f"hydra.sweep.dir={folder}"]


def statuses(folder: Path) -> list[str]:
    return [run.status() for run in runs.find_runs(folder)]


def wait_until_it_trains(folder: Path, running: object) -> Run:
    """Return the first run of a sweep that makes steps."""
    while True:
        assert running.poll() is None, running.communicate()  # type: ignore[attr-defined]
        for path in sorted(folder.glob("*/metrics.jsonl")):
            if '"train"' in path.read_text():
                return Run(path.parent)
        time.sleep(0.2)


# --- Slurm ---


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
    words = sweep(roberta, movies, tmp_path / "sweep", "optimizer.lr=1e-2,1e30", "hydra/launcher=submitit_slurm")
    said = process(*words, cwd=tmp_path, timeout=TIMEOUT, **cluster)
    assert said.code == 1, said
    assert said.err.splitlines()[-1].startswith("failed: job 2 (optimizer.lr=1e+30): ")
    assert "1 of 2 jobs finished" in said.out
    assert "MeZO" in said.out
    assert sorted(statuses(tmp_path / "sweep")) == ["failed", "finished"]


@pytest.mark.slow
def test_a_job_that_slurm_lost_is_interrupted_and_resumed(
    cluster: dict[str, str], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    """This cluster has no accounting: that a job has no result is seen in the queue."""
    folder, more = tmp_path / "sweep", ("steps=40", "eval_every=0", "log_every=1", "seed=1")
    running = start(*sweep(roberta, movies, folder, "hydra/launcher=submitit_slurm", *more), cwd=tmp_path, **cluster)
    os.kill(wait_until_it_trains(folder, running).info()["pid"], signal.SIGKILL)
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 1, (out, err)
    assert "failed: job 1: interrupted" in err
    assert statuses(folder) == ["interrupted"]
    assert process("resume", folder, cwd=tmp_path, timeout=TIMEOUT, **cluster).code == 0
    assert statuses(folder) == ["finished"]


@pytest.mark.slow
def test_ctrl_c_cancels_what_slurm_has_not_started(
    cluster: dict[str, str], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    cpus = os.cpu_count()
    folder, more = tmp_path / "sweep", ("steps=100000", "eval_every=0", "optimizer.lr=1e-6", "seed=1,2")
    one = ("hydra/launcher=submitit_slurm", f"hydra.launcher.cpus_per_task={cpus}")
    running = start(*sweep(roberta, movies, folder, *one, *more), cwd=tmp_path, **cluster)
    wait_until_it_trains(folder, running)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130, (out, err)
    assert "2 jobs are left; go on with: mezo resume sweep" in out
    assert [run.info()["status"] for run in runs.find_runs(folder)] == ["interrupted"]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for squeue")
def test_a_job_is_done_when_it_has_a_result_or_has_left_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue, queue, now = tmp_path / "squeue", slurm_queue.SlurmQueue(), 100.0
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm_queue, "time", SimpleNamespace(monotonic=lambda: now))
    result = tmp_path / "result.pkl"
    job = SimpleNamespace(job_id="7_1", paths=SimpleNamespace(result_pickle=result))
    queue.watch(job)
    squeue.write_text("#!/bin/sh\nexit 1\n")
    squeue.chmod(0o755)
    assert not job.done()  # the controller does not answer
    now += 10
    squeue.write_text("#!/bin/sh\necho 7_0; echo 7_1\n")
    assert not job.done()
    squeue.write_text("#!/bin/sh\necho 7_0\n")
    assert not job.done()  # asked at most every five seconds
    now += 10
    assert job.done()
    squeue.write_text("#!/bin/sh\necho 7_1\n")
    now += 10
    assert not job.done()
    result.touch()
    assert job.done()


# --- ray ---


@pytest.fixture
def ray() -> dict[str, str]:
    pytest.importorskip("ray", reason="needs ray: pip install hydra-ray-launcher -c constraints-ray.txt")
    if not overrides.is_installed("hydra-ray-launcher"):
        pytest.skip("needs hydra-ray-launcher: constraints-ray.txt")
    return {"RAY_AUTH_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "0,1"}  # no token in the home folder


@pytest.mark.slow
def test_ray_runs_the_jobs_of_a_sweep(ray: dict[str, str], roberta: Path, movies: Path, tmp_path: Path) -> None:
    more = ("hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.num_gpus=2")
    words = sweep(roberta, movies, tmp_path / "sweep", "optimizer.lr=1e-2,1e30", *more)
    said = process(*words, "--gpus-per-job", "1", cwd=tmp_path, timeout=TIMEOUT, **ray)
    assert said.code == 1, said
    assert said.err.splitlines()[-1].startswith("failed: job 2 (optimizer.lr=1e+30): ")
    assert "1 of 2 jobs finished" in said.out
    assert sorted(statuses(tmp_path / "sweep")) == ["failed", "finished"]
    assert {run.info()["cuda_visible_devices"] for run in runs.find_runs(tmp_path / "sweep")} <= {"0", "1"}
