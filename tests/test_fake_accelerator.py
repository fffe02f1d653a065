"""Steps on a fake device: nothing mixes it with the CPU, and the host waits for it once (see fake_accelerator.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.utils.backend_registration

from tests.device_cases import CASES, check_case

ROOT = Path(__file__).resolve().parents[1]

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch cannot register a device that is written in Python", allow_module_level=True)


def run(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return case -> what its process printed: an error, or what the host did."""
    command = [sys.executable, "-m", "tests.fake_accelerator", str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "MEZO_EAGER": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("models"), [*CASES])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_device_once(name: str, results: dict[str, Any]) -> None:
    assert "error" not in results[name], results[name]["error"]
    check_case(name, results[name])


@pytest.mark.slow
def test_a_generation_waits_once_per_token(tmp_path: Path) -> None:
    host = run(tmp_path, ["generation"])["generation"]
    assert "error" not in host, host["error"]
    assert len(host["waits"]) == 6, host["waits"]
    assert len(host["copies"]) == 4  # the prompts, their mask and positions, and keys of the random numbers
