"""scripts/measure_rounding.py, which made the tables of docs/storage.md: what is kept of the updates of theta."""

from pathlib import Path

import pytest

from mezo_cli.config.compose import build_config
from tests.scripts.load import load_script


def test_stochastic_rounding_keeps_the_updates_and_rounding_to_nearest_does_not(
    roberta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    script = load_script("measure_rounding")
    config = build_config([f"model.path={roberta}", "data=demo"])
    records = [(step, [10.0 - step], 1e-6) for step in range(20)]
    exact = script.movement(config, "float32", records)

    def kept(storage: str) -> float:
        moved = script.movement(config, storage, records)
        return float(moved @ exact / (exact @ exact))

    assert kept("bfloat16") == pytest.approx(1, abs=0.15)
    assert kept("float16") == pytest.approx(1, abs=0.05)
    with script.to_nearest():
        assert kept("bfloat16") < 0.3
    assert script.spread([0.5], ".1f") == "0.5"
    assert script.spread([1.0, 3.0], ".1f") == "2.0 (1.4)"
