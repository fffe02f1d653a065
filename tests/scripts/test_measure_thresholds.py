"""Thresholds on zero-shot scores: the best one, ties, AUC, and the table of a run's settings."""

import sys
from types import ModuleType

import numpy as np
import pytest

from tests.scripts.load import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_thresholds")


def test_the_best_threshold_and_the_auc(script: ModuleType) -> None:
    found, labels = np.array([0.1, 0.4, 0.5, 0.9]), np.array([0, 1, 0, 1])
    assert script.best_threshold(found, labels) == pytest.approx(0.25)
    assert script.accuracy(found, labels, 0.25) == 0.75
    assert script.auc(found, labels) == 0.75
    assert script.auc(np.zeros(4), labels) == 0.5
    assert script.best_threshold(found, np.zeros(4, int)) > 0.9


def test_the_table(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=demo", "data.eval_limit=8", "--train", "8"]
    monkeypatch.setattr(sys, "argv", ["measure_thresholds.py", *words])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert "on 8 train rows" in lines[-5]
    assert [line.split(" | ")[:2] for line in lines[-2:]] == [["| dev", "8"], ["| test", "8"]]
