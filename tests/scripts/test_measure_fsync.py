"""The fsyncs of a run are counted and timed."""

import os
import re
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import small
from tests.scripts.load import load_script


def test_a_run_is_trained_and_its_fsyncs_are_counted(
    tmp_path: Path, movies: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("measure_fsync")
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back at the end
    monkeypatch.setenv("MEZO_EAGER", "1")
    words = [w for w in small(tiny.roberta(tmp_path / "model"), movies, tmp_path) if "hydra" not in str(w)]
    monkeypatch.setattr("sys.argv", ["measure_fsync", *map(str, words), "--out", str(tmp_path)])
    script.main()
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert int(lines[0].split()[0]) > 20, lines
    assert re.fullmatch(r"\(\d+\.\d\d%\), the slowest \d+\.\d\d s, on \S+ at \S+ \(\S+\)", lines[1]), lines
    assert not list(tmp_path.glob("measure_fsync*"))
