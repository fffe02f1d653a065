"""scripts/kill_ranks.py finds the processes of a torchrun, and sees how far a run is."""

import os
import subprocess
import sys
from pathlib import Path

from tests.scripts.load import load_script


def test_ranks_are_found_by_their_command(tmp_path: Path) -> None:
    script = load_script("kill_ranks")
    ranks = [
        subprocess.Popen([sys.executable, "-c", "input()", "mezo_cli", word], stdin=subprocess.PIPE)
        for word in ("train", "train")
    ]
    other = subprocess.Popen([sys.executable, "-c", "input()", "torchrun"], stdin=subprocess.PIPE)
    try:
        found = script.ranks_of(os.getpid())
    finally:
        for process in (*ranks, other):
            process.kill()
            process.wait()
    assert found == [process.pid for process in ranks]


def test_the_steps_of_a_run_are_seen_by_its_trajectory(tmp_path: Path) -> None:
    script = load_script("kill_ranks")
    assert script.steps_of(tmp_path) == 0
    (tmp_path / "trajectory.bin").write_bytes(bytes(100))
    assert script.steps_of(tmp_path) == 5
