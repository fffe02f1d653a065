"""`mezo compare` on the command line: folders, mistakes, damaged runs, and real runs from end to end."""

import os
from pathlib import Path

import pytest

from tests.command_line import error_line, mezo
from tests.report.run_directories import make_run, make_two_methods


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_two_methods(tmp_path / "runs")


def test_several_folders_and_the_one_by_default(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mezo("compare", runs / "mezo", runs / "other").out == mezo("compare", runs).out
    os.rename(runs, runs.parent / "outputs")
    monkeypatch.chdir(runs.parent)
    assert "91.0 (2.0)" in mezo("compare").out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["{root}/rnus"], "no such folder (did you mean 'runs'?)"),
        (["{root}", "--out", "{root}/t.csw"], "allowed are .csv (did you mean '.csv'?)"),
        (["{root}", "--out", "{root}/folder.csv"], "this is a folder"),
        (["{root}", "--out", "{root}/runs/other/a/t.csv"], "is a run directory"),
        (["{root}", "--json", "--out", "{root}/t.csv"], "a document is printed or written, not both"),
    ],
)
def test_mistakes(words: list[str], part: str, runs: Path) -> None:
    root = runs.parent
    (root / "folder.csv").mkdir()
    before = sorted(root.rglob("*"))
    assert part in error_line(mezo("compare", *(word.replace("{root}", str(root)) for word in words)))
    assert sorted(root.rglob("*")) == before


def test_damaged_runs_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run").path
    (run / "run.json").write_text("{")
    assert f"no runs under {tmp_path} that can be read: " in mezo("compare", tmp_path).err


def test_no_outputs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no folder outputs/ here" in error_line(mezo("compare"))
    assert mezo("compare", "--paper").code == 0
