"""The wheel holds the configs and the demo, and works from any folder."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_sdist_has_what_the_makefile_needs() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"][
        "include"
    ]
    words = set(re.findall(r"[\w.]+", (ROOT / "Makefile").read_text()))
    tops = {f"/{path.name}" for path in ROOT.iterdir() if path.name in words and path.is_dir()} | {"/Makefile"}
    assert {"/scripts", "/constraints", "/tests", "/results"} <= tops
    tops -= {"/.ci", "/.venv", "/dist", "/outputs"}  # made by it
    assert [top for top in tops if not any(fnmatch(top, pattern) for pattern in patterns)] == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 20e6, "PyPI, uvx and a laptop are to have it quickly"
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_everything_a_run_needs_is_inside(installed: Path) -> None:
    inside = {str(path.relative_to(installed / "mezo_cli")) for path in (installed / "mezo_cli").rglob("*")}
    assert {"conf/config.yaml", "conf/task/sst2.yaml", "conf/experiment/demo.yaml"} <= inside
    assert {"conf/paper.yaml", "conf/experiment/paper/mezo.yaml"} <= inside
    assert {"report/paper.yaml", "report/templates/page.html", "report/templates/style.css"} <= inside
    assert {"perturb/noise/simd.cpp", "conf/engine/vllm.yaml"} <= inside
    assert {"demo/data/train.jsonl", "demo/model/model.safetensors", "demo/model/tokenizer.json"} <= inside
    assert {"demo/arithmetic/train.jsonl", "demo/decoder/model.safetensors", "conf/model/demo-decoder.yaml"} <= inside
    assert not any("tests" in name or name.endswith(".pyc") for name in inside)


@pytest.mark.slow
def test_it_composes_and_reads_the_demo_from_another_folder(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    words = [sys.executable, "-m", "mezo_cli", "data", "experiment=demo"]
    seen = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr
    assert "<mask>" in seen.stdout
    where = [sys.executable, "-c", "import mezo_cli; print(mezo_cli.__file__)"]
    path = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert path.startswith(str(installed))
