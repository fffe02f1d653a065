"""What two ranks reach is measured."""

import json
from pathlib import Path

import pytest

from tests.scripts.load import load_script


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
