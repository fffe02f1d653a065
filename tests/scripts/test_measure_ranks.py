"""What two ranks reach is measured."""

import json
from pathlib import Path

import pytest

from tests.scripts.load import load_script


def test_the_efficiency_is_of_what_both_reach_together() -> None:
    script = load_script("measure_ranks")
    timed = {"rows alone": [2.0], "rows together": [1.25], "directions alone": [4.0], "directions together": [2.0]}
    found = script.summarize([{**timed, "exchange": [1e-4]}] * 2)
    assert found["rows"]["efficiency"] == pytest.approx(0.8)
    assert found["directions"]["efficiency"] == pytest.approx(1.0)


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
    assert json.loads((tmp_path / "ranks.json").read_text())["rows"]["efficiency"] > 0
