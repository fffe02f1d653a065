"""What two ranks reach is measured, and 1,000 workers are simulated from it."""

import json
from pathlib import Path

import pytest

from tests.scripts.load import load_script

MEASURED = {
    "rows": {"alone": [1.0, 1.0], "shared": [0.55, 0.55]},
    "directions": {"alone": [2.0, 2.0], "shared": [1.0, 1.0]},
    "exchange": 1e-4,
}


def test_the_share_is_of_what_both_reach_together() -> None:
    script = load_script("measure_ranks")
    timed = {"rows alone": [2.0], "rows shared": [1.25], "directions alone": [4.0], "directions shared": [2.0]}
    found = script.summarize([{**timed, "exchange": [1e-4]}] * 2)
    assert found["rows"]["share"] == pytest.approx(0.8)
    assert found["directions"]["share"] == pytest.approx(1.0)


@pytest.mark.slow
def test_two_ranks_are_measured(
    tmp_path: Path, roberta: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("measure_ranks")
    monkeypatch.setenv("MEZO_EAGER", "1")
    words = ["--rows", "4x16", "--rounds", "1", "--model", str(roberta), "--out", str(tmp_path / "ranks.json")]
    monkeypatch.setattr("sys.argv", ["measure_ranks", *words])
    script.main()
    assert "directions  alone" in capsys.readouterr().out
    assert json.loads((tmp_path / "ranks.json").read_text())["rows"]["share"] > 0


def test_workers_are_simulated() -> None:
    script = load_script("simulate_workers")
    assert script.update_part([1.0], [0.5]) == 0
    assert script.update_part([1.0], [0.55]) == pytest.approx(0.1)
    assert script.simulate([1.0], 0.0, 0.0, 4, 8, 10) == pytest.approx(0.25)
    assert script.simulate([1.0], 0.2, 0.0, 4, 8, 10) == pytest.approx(0.4)
    assert script.simulate([1.0], 0.0, 0.01, 4, 8, 10) == pytest.approx(0.28)
    assert script.simulate([1.0], 0.0, 0.0, 16, 8, 10) == pytest.approx(1 / 8)  # eight of them have nothing to do
    lines = script.table(MEASURED, 1e-4, 20)
    assert len(lines) == 2 + len(script.WORKERS)
    assert lines[2].startswith("| 1 | 1.0 times (100%) |")
