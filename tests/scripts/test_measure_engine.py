"""The script that measures the prefix cache compares the ways in one run."""

from pathlib import Path

import pytest

from tests import tiny
from tests.engine.fakes import fake_python
from tests.scripts.load import load_script


@pytest.mark.slow
def test_each_way_has_a_line_with_its_time_and_its_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("measure_engine")
    model, python = tiny.decoder(tmp_path / "model", "llama"), fake_python(tmp_path / "bin")
    words = ["--model", model, "--python", python, "--rows", 2, "--common", 5, "--own", 2, "--repeats", 1]
    monkeypatch.setattr("sys.argv", ["measure_engine", *map(str, words)])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 rows of 5 common tokens and 2 of their own")
    assert [line[:24].strip() for line in lines[1:4]] == ["transformers", "vLLM without the cache", "vLLM"]
    assert all(float(line.split()[-1]) < 1e-5 for line in lines[1:4])
    assert lines[4] == "80% of the tokens were read from the cache"


def test_without_an_engine_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("measure_engine")
    monkeypatch.setattr(script, "random_model", lambda folder: folder)
    monkeypatch.setattr("sys.argv", ["measure_engine", "--python", "/nowhere/python"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2
    assert "engine.python=/nowhere/python: there is no such program" in capsys.readouterr().err
