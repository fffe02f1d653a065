"""A comparison as a file: Markdown, CSV and JSON, written completely or not at all."""

import csv
import json
from pathlib import Path

import pytest

from mezo_cli.runs import files
from tests.command_line import mezo
from tests.report.run_directories import make_two_methods


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_two_methods(tmp_path / "runs")


def test_markdown(runs: Path, tmp_path: Path) -> None:
    said = mezo("compare", runs, "--out", tmp_path / "t.md")
    assert (said.code, said.out) == (0, f"wrote {tmp_path / 't.md'}\n")
    text = (tmp_path / "t.md").read_text().splitlines()
    assert text[0] == "**roberta-large, mlm, cross\\_entropy**"
    assert text[2:5] == [
        "| task | shots | method | steps | seeds | dev | test | paper | diff |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
        "| sst2 | 16 | MeZO | 100000 | 5 | 82.0 | 91.0 (2.0) | 90.5 (1.2) | +0.5 |",
    ]
    assert "- sst2 k=16 MeZO (noise=rademacher): seed 21 failed (the disk \\| is full)" in text


def test_csv(runs: Path, tmp_path: Path) -> None:
    assert mezo("compare", runs, "--out", tmp_path / "t.csv").code == 0
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["method"], first["n"], first["test_mean"], first["test_std"]) == ("MeZO", "5", "91.0", "2.0")
    assert (first["paper_mean"], first["paper_std"], first["difference"]) == ("90.5", "1.2", "0.5")
    assert (second["label"], second["test_std"]) == ("MeZO (noise=rademacher)", "")
    assert (second["seeds"], second["missing"]) == ("13", "21 42 87 100")
    assert "failed (the disk | is full)" in second["troubles"]


def test_json(runs: Path, tmp_path: Path) -> None:
    assert mezo("compare", runs, "--out", tmp_path / "t.json").code == 0
    first, second = json.loads((tmp_path / "t.json").read_text())["groups"]
    assert (first["n"], first["test_mean"], first["test_std"], first["paper_mean"]) == (5, 91.0, 2.0, 90.5)
    assert first["seeds"]["13"]["picked"]["optimizer.lr"] == 1e-7
    assert first["seeds"]["21"]["picked"]["optimizer.lr"] == 1e-6
    assert all(Path(run).is_dir() for seed in first["seeds"].values() for run in seed["runs"])
    assert second["missing"] == [21, 42, 87, 100]
    assert second["settings"]["optimizer.noise"] == "rademacher"


def test_a_file_is_written_completely_or_not(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "t.md"
    out.write_text("the old one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    result = mezo("compare", runs, "--out", out)
    assert (result.code, result.err) == (1, f"error: --out {out}: cannot be written: No space left on device\n")
    assert out.read_text() == "the old one"
    assert [p.name for p in tmp_path.iterdir() if "t.md" in p.name] == ["t.md"]
