"""Reading runs: where they are found, and what damage does."""

from pathlib import Path
from typing import Any

import pytest

from mezo_cli.report.entries import read_runs
from tests.report.run_directories import make_entry, make_run


def test_each_run_is_found_once_also_inside_a_sweep(tmp_path: Path) -> None:
    make_run(tmp_path / "multirun" / "2026-01-01" / "0", {"seed": 1})
    make_run(tmp_path / "multirun" / "2026-01-01" / "1", {"seed": 2})
    entries, _ = read_runs([tmp_path, tmp_path / "multirun", tmp_path / "multirun" / "2026-01-01" / "1"])
    assert sorted(entry.config.seed for entry in entries) == [1, 2]


@pytest.mark.parametrize(
    ("settings", "shots", "seed"),
    [
        ({"seed": 7}, None, 7),
        ({"seed": 7, "data.seed": 13, "data.shots": 16}, 16, 13),
        ({"data.name": "files", "data.dir": "/k/SST-2/16-87"}, 16, 87),
        ({"data.name": "files", "data.dir": "/k/SST-2/512-13", "data.shots": 16, "data.seed": 21}, 16, 21),
        ({"data.name": "files", "data.dir": "/k/SST-2"}, None, 42),
    ],
)
def test_shots_and_data_seed(settings: dict[str, Any], shots: int | None, seed: int) -> None:
    entry = make_entry(settings)
    assert (entry.shots, entry.data_seed) == (shots, seed)
