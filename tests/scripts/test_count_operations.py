"""scripts/count_operations.py counts on the fake device."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_step_is_counted_against_two_plain_forwards() -> None:
    words = [sys.executable, "scripts/count_operations.py", "--shape", "tiny", "2x8"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert [row[1] for row in rows] == ["two plain forwards", "a step", "its update"]
    plain, step, update = ([int(cell) for cell in row[2:5]] for row in rows)
    assert plain[2] == 0
    assert plain[1] < step[1]
    assert 0 < update[2] < step[2]
    assert all(launches <= operations for operations, launches, _ in (plain, step, update))
