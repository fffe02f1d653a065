"""scripts/bench/bench_runs.py: runs are listed, and the times are printed."""

import re
from pathlib import Path

import pytest

from tests.scripts.load import load_script

RUN = Path(__file__).resolve().parents[1] / "fixtures" / "runs" / "mezo"


def test_it_prints_two_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench_runs.py", str(RUN), "--count", "3", "--repeats", "1"])
    load_script("bench_runs").main()
    out = capsys.readouterr().out
    assert out.startswith("mezo runs, 3 runs, 1 times, load ")
    times = re.findall(r"^(wall|CPU) +median (\d+\.\d\d) s, least (\d+\.\d\d) s$", out, re.M)
    assert [name for name, *_ in times] == ["wall", "CPU"]
    assert all(float(median) == float(least) > 0 for _, median, least in times)
