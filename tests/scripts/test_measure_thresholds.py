"""Thresholds on zero-shot scores: the table of a run's settings."""

import sys
from types import ModuleType

import pytest

from tests.scripts.load import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_thresholds")


def test_the_table(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=demo", "data.eval_limit=8", "--train", "8"]
    monkeypatch.setattr(sys, "argv", ["measure_thresholds.py", *words])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert "on 8 train rows" in lines[-5]
    assert [line.split(" | ")[:2] for line in lines[-2:]] == [["| dev", "8"], ["| test", "8"]]
