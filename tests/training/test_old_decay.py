"""Runs with weight decay made by commit c322d5d (tests/fixtures/make_runs.py) replay and resume bitwise identically.

They round 1 - lr wd to float32, which later runs do not.
"""

import hashlib
import json
from pathlib import Path

import pytest

from mezo_cli.runs import trajectory
from tests.command_line import mezo
from tests.training.test_old_runs import INTERRUPTED_AT, STEPS, resume, stored_lines, trained_weights

RUNS = Path(__file__).resolve().parents[1] / "fixtures" / "decay"
EXPECTED: dict[str, dict[str, str]] = json.loads((RUNS / "expected.json").read_text())["adapter_model.safetensors"]

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "step"), [(name, step) for name in EXPECTED for step in ("5", "12")])
def test_replay_gives_the_same_bits(name: str, step: str, tmp_path: Path) -> None:
    result = mezo("replay", RUNS / name, "--step", step, "--out", tmp_path / "out")
    assert result.code == 0, result
    weights = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == EXPECTED[name][step]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_resumed_run_goes_on_as_it_began(name: str, tmp_path: Path) -> None:
    """Its trajectory still says nothing of float64, so a replay of it uses the factor that the test above checks."""
    stored = RUNS / f"{name}-interrupted"
    resumed = resume(stored, tmp_path / "run")
    assert (resumed.run / "trajectory.bin").read_bytes().startswith((stored / "trajectory.bin").read_bytes())
    past = trajectory.read(resumed.run / "trajectory.bin")
    assert (past.header.weight_decay, past.header.decay, len(past)) == (0.1, None, STEPS)
    assert stored_lines(resumed.run)[: len(stored_lines(stored))] == stored_lines(stored)
    assert trained_weights(resumed.run, str(INTERRUPTED_AT)) == trained_weights(RUNS / name, str(INTERRUPTED_AT))
    for step in (INTERRUPTED_AT, STEPS):
        assert trained_weights(resumed.run, str(step)) == resumed.live[step]
