"""`mezo compare` on the command line: folders, mistakes, damaged runs, and real runs from end to end."""

import json
import os
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import error_line, mezo, small
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


@pytest.mark.slow
def test_real_runs_from_end_to_end(roberta: Path, tmp_path: Path) -> None:
    for seed in (13, 21):
        tiny.movie_folder(tmp_path / "SST-2" / f"4-{seed}", train=8 + 2 * (seed == 21), dev=8, test=8)
    folders = ",".join(str(tmp_path / "SST-2" / f"4-{seed}") for seed in (13, 21))
    words = small(roberta, Path(folders), tmp_path / "unused", "optimizer.lr=1e-3,1e-2", "steps=3", "log_every=1")
    words = [word for word in words if not word.startswith("hydra.run.dir")]
    said = mezo("train", "-m", *words, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert said.code == 0, said
    cls = small(roberta, tmp_path / "SST-2" / "4-13", tmp_path / "cls", "objective=cls", "steps=3", "optimizer.lr=1e-3")
    assert mezo("train", *cls).code == 0
    still = [*cls[:-2], "objective=mlm", "objective.loss=accuracy", "steps=3", "optimizer.lr=1e-9"]
    still = [word.replace(str(tmp_path / "cls"), str(tmp_path / "accuracy")) for word in still]
    assert mezo("train", *still).code == 0

    found = json.loads(mezo("compare", tmp_path, "--json").out)["groups"]
    assert [(g["objective"], g["loss"], g["shots"], g["n"]) for g in found] == [
        ("mlm", "cross_entropy", 4, 2),
        ("mlm", "accuracy", 4, 1),
        ("cls", "cross_entropy", 4, 1),
    ]
    for seed, number in (("13", 0), ("21", 1)):
        jobs = [json.loads(f.read_text()) for f in sorted((tmp_path / "sweep").glob("*/summary.json"))]
        mine = [job for job in jobs if job["train"]["rows"] == 8 + 2 * number]
        best = max(
            (job for job in mine if job["verdict"] != "diverged"),
            key=lambda job: (job["dev"]["accuracy"], -job["dev"]["loss"]),
        )
        assert found[0]["seeds"][seed]["test"] == pytest.approx(100 * best["test"]["accuracy"], abs=1e-3)
    assert found[1]["missing"] == found[2]["missing"] == [21, 42, 87, 100]
