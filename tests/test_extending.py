"""docs/how-to/extending.md: its task runs, its two packages install, pass their conformance tests, and train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mezo_cli.objectives.base import Objective
from mezo_cli.runs import Run
from tests.command_line import environment, mezo, small
from tests.doc_blocks import files

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "extending.md"
DEMO = ["model=demo", "data=demo", "model.device=cpu", "steps=4", "batch_size=4", "data.eval_limit=20", "log_every=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the page."""
    folder = tmp_path_factory.mktemp("extending")
    for name, text in files(PAGE).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(folder: Path) -> Path:
    """Build both packages and install them into a folder of their own."""
    target = folder / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "--target", str(target), "./mezo-rms", "./null-prompt"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python in a process that sees the installed packages."""
    path = os.pathsep.join(map(str, (installed, ROOT)))
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=installed.parent, env=environment(PYTHONPATH=path), capture_output=True, text=True
    )


def test_all_that_an_objective_may_define_is_on_the_page() -> None:
    names = [name for name in vars(Objective) if not name.startswith("_")]
    assert "lay_out" in names
    page = PAGE.read_text()
    assert [name for name in names if f"`{name}" not in page and f" {name}(" not in page] == []


def test_a_task_is_one_file(folder: Path, roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = small(roberta, movies, tmp_path / "run", "task=reviews", "steps=1")
    done = mezo("train", "--config-dir", folder / "my-conf", *words)
    assert done.code == 0, done
    shown = mezo("data", "--config-dir", folder / "my-conf", "task=reviews", *words[:3])
    assert "All in all, it was" in shown.out


@pytest.mark.slow
def test_the_optimizer_passes_its_conformance_tests_and_trains(installed: Path) -> None:
    tests = run(installed, "pytest", "-q", "-p", "no:cacheprovider", "mezo-rms/tests")
    assert tests.returncode == 0, tests.stdout
    words = ["optimizer=mezo_rms", "optimizer.lr=1e-3", "optimizer.decay=0.9", *DEMO]
    trained = run(installed, "mezo_cli", "train", *words, "hydra.run.dir=rms")
    assert trained.returncode == 0, trained.stderr
    replayed = run(installed, "mezo_cli", "replay", "rms", "--step", "4", "--out", "replayed")
    assert replayed.returncode == 0, replayed.stderr
    weights = [installed.parent / name / "model.safetensors" for name in ("rms/checkpoints/last", "replayed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert "  decay: 0.9\n" in (installed.parent / "rms" / "config.yaml").read_text()
    assert "MeZO-RMS" in run(installed, "mezo_cli", "compare", "rms").stdout
    for words, line in {
        ("optimizer=mezo_rms", "optimizer.decay=2"): "optimizer.decay=2: out of range, allowed is a finite number",
        ("optimizer=mezo_rms", "optimizer.momentum=0.5"): "optimizer=mezo_rms does not read it",
        ("optimizer=mezo_rsm",): "no such optimizer (did you mean 'mezo_rms'?)",
    }.items():
        refused = run(installed, "mezo_cli", "train", *words)
        assert refused.returncode == 2
        assert line in refused.stderr


@pytest.mark.slow
def test_the_objective_passes_its_conformance_tests_and_trains(installed: Path) -> None:
    tests = run(installed, "pytest", "-q", "-p", "no:cacheprovider", "null-prompt/tests")
    assert tests.returncode == 0, tests.stdout
    trained = run(installed, "mezo_cli", "train", "objective=null_prompt", *DEMO, "hydra.run.dir=prompt")
    assert trained.returncode == 0, trained.stderr
    assert Run(installed.parent / "prompt").read_summary()["steps"] == 4
