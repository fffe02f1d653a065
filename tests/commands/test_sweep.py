"""`mezo train -m`: each job is a command with a directory and a failure of its own; a stopped sweep can go on."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import runs
from mezo_cli.config import overrides
from mezo_cli.runs import Run
from mezo_cli.sweep import jobs
from mezo_cli.sweep.plan import read_record
from tests import tiny
from tests.command_line import HANGS, Result, environment, error_line, mezo, ok, process, small, start

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def sweep(model: Any, data: Path, folder: Path, *more: str) -> list[str]:
    """The words of a sweep of two steps per job."""
    words = [word for word in small(model, data, folder, "steps=2", *more) if not word.startswith("hydra.run.dir")]
    return ["-m", *words, f"hydra.sweep.dir={folder}"]


def statuses(folder: Path) -> dict[str, str]:
    """The status of each job by the name of its directory, in the order of names: two at once start in any order."""
    return dict(sorted((run.path.name, run.status()) for run in runs.find_runs(folder)))


def wait_until_it_trains(folder: Path, running: "subprocess.Popen[str]") -> Run:
    """Return the first run of a sweep that makes steps."""
    while True:
        assert running.poll() is None, running.communicate()
        for path in sorted(folder.glob("*/metrics.jsonl")):
            if '"train"' in path.read_text():
                return Run(path.parent)
        time.sleep(0.1)


Done = tuple[Path, list[str], Result]  # the folder of a sweep, its words, and how it ended
NEVER_ENDS = ("steps=100000", "eval_every=0", "optimizer.lr=1e-6")


def files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent != folder}


@pytest.fixture(scope="module")
def done(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A sweep of two seeds, and three learning rates of which one fails, two jobs at a time."""
    folder = tmp_path_factory.mktemp("done")
    movies = tiny.movie_folder(folder / "movies")
    words = ["seed=13,42", *sweep(roberta, movies, folder / "sweep", "optimizer.lr=1e-2,1e-3,1e30")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
        return folder / "sweep", words, mezo("train", *words, "model.device=cpu", "--jobs", "2")


def test_each_job_has_a_directory_and_its_own_failure(done: Done) -> None:
    folder, _, said = done
    assert said.code == 1, said
    ends = ["finished", "finished", "failed"] * 2
    assert list(statuses(folder).values()) == ends
    texts = [(run.path / "config.yaml").read_text() for run in runs.find_runs(folder)]
    pairs = {re.search(r"lr: (\S+).*\nseed: (\d+)", text, re.S).groups() for text in texts}  # type: ignore[union-attr]
    assert pairs == {(lr, seed) for lr in ("0.01", "0.001", "1.0e+30") for seed in ("13", "42")}
    for line in ("job 5 of 6  seed=42 optimizer.lr=0.001  finished", "4 of 6 jobs finished", "MeZO"):
        assert line in said.out
    assert [line.partition("): ")[0] for line in said.err.splitlines()] == [
        f"failed: job {number} (seed={seed} optimizer.lr=1e+30" for number, seed in ((3, 13), (6, 42))
    ]
    infos = [run.info() for run in runs.find_runs(folder)]
    assert len({os.getpid(), *(info["pid"] for info in infos)}) == 7
    assert {info["cuda_visible_devices"] for info in infos} == {"4,5", "6,7"}
    assert infos[0]["argv"][:2] == ["mezo", "train"]
    record = json.loads((folder / "sweep.json").read_text())
    assert (record["format"], record["user_code"], len(record["jobs"])) == (1, [], 6)


def test_the_finished_is_left_as_it_is_and_the_failed_tried_again(done: Done) -> None:
    folder, words, _ = done
    before = {path: data for path, data in files(folder).items() if path.parts[-2] not in ("2", "5")}
    same = [word.replace("seed=13,42", "seed=range(13,43,29)") for word in words]
    again = mezo("train", "-q", *same, "model.device=cpu")
    assert (again.code, again.out) == (1, f"{folder}\n")
    said = mezo("resume", folder)
    assert said.code == 1, said
    assert "4 of 6 jobs finished before: skipped" in said.out
    assert "job 3 of 6  seed=13 optimizer.lr=1e+30  failed" in said.out
    for grid in ("seed=13,43", "seed=13"):
        line = error_line(mezo("train", grid, *words[1:], "model.device=cpu"))
        assert f"{folder} contains a sweep over another grid" in line
    assert before.items() <= files(folder).items()


def test_print_shows_what_is_left(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "a sweep", "seed=1,2,3", "steps=1", "eval_every=0")
    said = mezo("train", *words, "--print")
    assert (said.code, said.err) == (0, ""), said
    lines = [shlex.split(line) for line in said.out.splitlines()]
    assert [line[:2] for line in lines] == [["mezo", "train"]] * 3
    assert json.loads((tmp_path / "a sweep" / "sweep.json").read_text())["jobs"][2]["directory"] == "2"
    assert statuses(tmp_path / "a sweep") == {}
    assert mezo(*lines[1][1:]).code == 0
    assert statuses(tmp_path / "a sweep") == {"1": "finished"}
    left = mezo("train", *words, "--print").out.splitlines()
    assert left == [shlex.join(line) for line in (lines[0], lines[2])]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["seed=1,2", "batch_size=8,0"], ["batch_size=0"]),
        (["seed=1,2", "hydra.sweep.subdir=${task.name}"], ["the directory of another job"]),
        (["seed=1,2", "hydra.sweep.subdir=${nope}"], ["does not resolve"]),
        (["seed=1,2", "hydra.sweep.subdir=a,b"], ["hydra.sweep.subdir takes one"]),
        (["seed=1,2", "hydra.sweep.dir=./${seed}"], ["a sweep has one directory"]),
        (["seed=1,2", "hydra/sweeper=optuna"], ["hydra/sweeper=optuna", "a sweep is a grid", "mezo tune"]),
        (["seed=1,2", "hydra.run.dir=x"], ["'hydra.run.dir=x' is about a single run"]),
        (["seed=1,2", "--jobs=0"], ["Invalid value for '--jobs'"]),
        (["seed=1,2", "--jobs=2", "--print"], ["--print runs nothing"]),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], parts: list[str], tmp_path: Path) -> None:
    own = [] if words[-1].startswith("hydra.sweep.dir") else ["hydra.sweep.dir=sweep"]
    line = error_line(mezo("train", "-m", "experiment=demo", *words, *own))
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


def test_flags_of_a_sweep_are_refused_elsewhere(done: Done) -> None:
    for flag in ("--jobs=2", "--print"):
        assert f"{flag.partition('=')[0]} needs a sweep" in error_line(mezo("train", flag, "steps=1"))
    assert "--jobs" in error_line(mezo("resume", done[0] / "0", "--jobs=2"))


def test_gpus_are_shared_among_the_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1, GPU-2,-1,GPU-3")
    assert jobs.gpu_shares(1) == [{}]
    assert jobs.gpu_shares(2) == [{"CUDA_VISIBLE_DEVICES": "GPU-1"}, {"CUDA_VISIBLE_DEVICES": "GPU-2"}]
    words = ["-m", "experiment=demo", "seed=1,2,3", "hydra.sweep.dir=sweep", "--jobs", "3"]
    assert "--jobs 3: 2 GPUs are visible: give --jobs 2" in error_line(mezo("train", *words))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert jobs.gpu_shares(3) == [{}, {}, {}]


@pytest.mark.slow
def test_a_killed_sweep_ends_bitwise_identical(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a job, which ends with it; another job was killed before its config.yaml."""
    more = ["seed=1,2,3", "steps=20", "eval_every=10", "log_every=1"]
    assert mezo("train", *sweep(roberta, movies, tmp_path / "whole", *more)).code == 0
    running = start("train", *sweep(roberta, movies, tmp_path / "cut", *more), cwd=tmp_path)
    job = wait_until_it_trains(tmp_path / "cut", running)
    running.kill()
    running.communicate()
    while job.status() == "running":
        pass
    assert set(statuses(tmp_path / "cut").values()) <= {"interrupted", "finished"}
    (tmp_path / "cut" / "2").mkdir(exist_ok=True)
    shutil.copy(tmp_path / "whole" / "2" / "run.json", tmp_path / "cut" / "2")
    (tmp_path / "cut" / "2" / "train.log").touch()
    said = ok("resume", tmp_path / "cut")
    assert "3 of 3 jobs finished" in said.out
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
    assert "--config-dir, which is not stored: give it again" in error_line(mezo("resume", "moved"))
    again = ("resume", "moved", "--config-dir", "../conf")
    assert mezo(*again).code == 0
    assert statuses(tmp_path / "elsewhere" / "moved") == {"0": "finished", "1": "finished"}
    file.write_text(f"{file.read_text()}optimizer:\n  eps: 0.01\n")
    assert "moved/0 contains a run with other settings" in error_line(mezo(*again))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("summary.json", lambda path: path.write_text(path.read_text()[2:])),
        ("summary.json", Path.unlink),
        ("trajectory.bin", lambda path: path.write_bytes(b"")),
        ("config.yaml", lambda path: path.write_text(path.read_text()[2:])),
        ("run.json", Path.unlink),
    ],
)
def test_a_damaged_job_is_told_once(name: str, damage: Callable[[Path], Any], done: Done, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(done[0], tmp_path / "sweep"))
    record = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps({**record, "jobs": record["jobs"][:2]}))
    damage(folder / "1" / name)
    said = mezo("resume", folder)
    assert (said.code, "1 of 2 jobs finished" in said.out) == (1, True), said
    (line,) = said.err.splitlines()
    assert line.startswith(f"failed: job 2 (optimizer.lr=0.001): {folder / '1' / name}")
    assert name not in said.out


def test_a_stored_sweep_is_data(done: Done, tmp_path: Path) -> None:
    """A sweep.json may be somebody else's: nothing in it but overrides of mezo's own keys is used."""
    record = json.loads((done[0] / "sweep.json").read_text())
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\ndef score(completions, rows):\n    return []\n")
    (tmp_path / "sweep").mkdir()
    given = [*record["jobs"][0]["overrides"], f"objective.reward={tmp_path}/evil.py:score"]
    (tmp_path / "sweep" / "sweep.json").write_text(
        json.dumps({**record, "jobs": [{**record["jobs"][0], "overrides": given}]})
    )
    assert f"'{given[-1]}' is not taken from a file" in error_line(mezo("resume", tmp_path / "sweep"))
    for changes, part in (
        ({"jobs": [{**record["jobs"][0], "directory": "../out"}]}, "which is not in"),
        ({"config_dir": str(tmp_path)}, "is damaged: config_dir"),
        ({"format": 7}, "of a version of mezo before 1.0, or of a format that this one does not know"),
    ):
        (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({**record, **changes}))
        assert part in error_line(mezo("resume", tmp_path / "sweep"))
    assert not marker.exists()
    assert "keeps its settings" in error_line(mezo("resume", done[0], "seed=3"))


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_says_once_how_to_go_on(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """Every process of the group gets SIGINT, as from a terminal."""
    folder = tmp_path / "sweep"
    words = sweep(roberta, movies, folder, "seed=1,2,3", *NEVER_ENDS)
    code = "import os, sys; os.setsid(); os.execv(sys.executable, [sys.executable, '-m', 'mezo_cli', *sys.argv[1:]])"
    command, pipe = [sys.executable, "-c", code, "train", *map(str, words)], subprocess.PIPE
    running = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True)
    job = wait_until_it_trains(folder, running)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=HANGS)
    assert running.returncode == 130, (out, err)
    assert (out + err).count("mezo resume") == 1
    assert "3 jobs are left; continue with: mezo resume sweep\n" in out
    assert err.splitlines()[-1] == "error: interrupted"
    assert json.loads((job.path / "run.json").read_text())["status"] == "interrupted"  # recorded, not only found out


@pytest.mark.slow
def test_a_killed_job_is_interrupted_and_a_running_one_left_alone(roberta: Path, movies: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    words = sweep(roberta, movies, folder, "seed=1,2", "steps=300", "eval_every=0", "optimizer.lr=1e-6")
    running = start("train", *words, cwd=tmp_path)
    os.kill(wait_until_it_trains(folder, running).info()["pid"], signal.SIGKILL)
    while "1" not in statuses(folder) or not (folder / "1" / "metrics.jsonl").exists():
        assert running.poll() is None
    said = process("resume", folder, "-q", cwd=tmp_path)
    assert said.code == 0, said
    assert statuses(folder)["0"] == "finished"
    out, err = running.communicate(timeout=HANGS)
    assert "Traceback" not in out + err
    assert set(statuses(folder).values()) == {"finished"}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not overrides.is_installed(package), reason=f"needs {package}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("joblib", marks=needs("hydra-joblib-launcher")),
        pytest.param("submitit_local", marks=needs("hydra-submitit-launcher")),
        pytest.param("ray", marks=needs("hydra-ray-launcher")),
    ],
)
def test_a_launcher_runs_the_command_of_each_job(launcher: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", f"hydra/launcher={launcher}", "optimizer.lr=1e-2,1e30")
    said = process("train", *words, cwd=tmp_path, RAY_AUTH_MODE="disabled")
    assert said.code == 1, said
    assert said.err.splitlines()[-1].startswith("failed: job 2 (optimizer.lr=1e+30): ")
    assert "1 of 2 jobs finished" in said.out
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "failed"}
    assert [job.overrides[-1] for job in read_record(tmp_path / "sweep").jobs] == [
        "optimizer.lr=0.01",
        "optimizer.lr=1e+30",
    ]
    shutil.rmtree(tmp_path / "sweep" / "0")
    assert mezo("resume", tmp_path / "sweep").code == 1  # by this process's own workers
    assert statuses(tmp_path / "sweep") == {"0": "finished", "1": "failed"}


@needs("hydra-joblib-launcher")
@pytest.mark.parametrize("setting", ["n_jobs=0", "n_jobs=many", "nosuch=1"])
def test_settings_that_a_launcher_refuses(setting: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = sweep(roberta, movies, tmp_path / "sweep", "hydra/launcher=joblib", "seed=1,2")
    line = error_line(mezo("train", *words, f"hydra.launcher.{setting}"))
    assert setting.partition("=")[0] in line
    assert not list(tmp_path.glob("sweep/*/run.json"))


@needs("hydra-submitit-launcher")
def test_slurm_that_is_not_there(roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = sweep(roberta, movies, tmp_path / "sweep", "hydra/launcher=submitit_slurm", "seed=1,2")
    line = error_line(mezo("train", *words))
    assert line.startswith("error: hydra/launcher=submitit_slurm: ")
    assert statuses(tmp_path / "sweep") == {}
