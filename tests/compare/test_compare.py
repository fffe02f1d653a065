"""`mezo compare` as a user meets it: the table, the files, the mistakes; and real runs from end to end."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mezo_cli.runs import sealed
from tests import tiny
from tests.compare.made import SEEDS, cells_of, grid, made
from tests.door import environment, mezo, refused, small

FEW = {"data.shots": 16}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two methods on SST-2, one of them with holes."""
    root = tmp_path / "runs"
    grid(root / "mezo", FEW, {1e-6: dict.fromkeys(SEEDS, (0.8, 0.9)), 1e-7: {13: (0.9, 0.95)}})
    made(root / "other" / "a", {**FEW, "seed": 13, "optimizer.noise": "rademacher"}, dev=0.7, test=0.6)
    made(root / "other" / "b", {**FEW, "seed": 21, "optimizer.noise": "rademacher"}, ended="the disk | is\nfull")
    return root


def rows(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


def test_the_table(runs: Path) -> None:
    said = mezo("compare", runs)
    assert said.code == 0, said
    assert rows(said.out)[:4] == [
        "roberta-large, mlm, cross_entropy",
        "task shots method steps seeds dev test paper diff",
        "sst2 16 MeZO 100000 5 82.0 91.0 (2.0) 90.5 (1.2) +0.5",
        "sst2 16 MeZO (noise=rademacher) 100000 1/5 70.0 60.0 90.5 (1.2) -30.5 *",
    ]
    assert rows(said.out)[5:] == [
        "- sst2 k=16 MeZO: lr=1e-07: not run: seeds 21, 42, 87, 100",
        "- sst2 k=16 MeZO (noise=rademacher): not run: seeds 42, 87, 100",
        "- sst2 k=16 MeZO (noise=rademacher): seed 21 failed (the disk | is full)",
        "- sst2 k=16 MeZO (noise=rademacher): * unlike the paper: noise=rademacher not gaussian; 1 of 5 data seeds",
    ]


def test_what_was_picked(runs: Path) -> None:
    told = rows(mezo("compare", "--seeds", runs).out)
    at = told.index("what was picked")
    assert told[at + 1 : at + 4] == [
        "task shots method picked seed dev test",
        "sst2 16 MeZO lr=1e-07 13 90.0 95.0",
        "sst2 16 MeZO lr=1e-06 21 80.0 90.0",
    ]


def test_several_folders_and_the_one_by_default(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mezo("compare", runs / "mezo", runs / "other").out == mezo("compare", runs).out
    os.rename(runs, runs.parent / "outputs")
    monkeypatch.chdir(runs.parent)
    assert "91.0 (2.0)" in mezo("compare").out


@pytest.mark.parametrize("width", [80, 140])
def test_it_fits_its_terminal(width: int, runs: Path) -> None:
    """In a process on a terminal of that width no number is folded and no line is longer."""
    code = (
        "import io, sys\nfrom pathlib import Path\nfrom rich.console import Console\n"
        "from mezo_cli import terminal\nfrom mezo_cli.cli import main\n"
        f"terminal.make_console = lambda: Console(width={width}, file=sys.stdout)\n"
        f"sys.argv = ['mezo', 'compare', '--seeds', {str(runs)!r}]\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= width
    assert "90.5 (1.2)" in done.stdout
    assert "91.0 (2.0)" in done.stdout
    assert "-30.5 *" in done.stdout


# --- files ---


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


def test_a_file_is_whole_or_not_there(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "t.md"
    out.write_text("the old one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealed.os, "replace", full)
    assert "t.md: cannot be written: No space left on device" in refused(mezo("compare", runs, "--out", out))
    assert out.read_text() == "the old one"
    assert [p.name for p in tmp_path.iterdir() if "t.md" in p.name] == ["t.md"]


# --- mistakes ---


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["{root}/rnus"], "no such folder (did you mean 'runs'?)"),
        (["{root}", "--out", "{root}/t.mdd"], "allowed are .md, .csv, .json (did you mean '.md'?)"),
        (["{root}", "--out", "{root}/t"], "allowed are .md, .csv, .json"),
        (["{root}", "--out", "{root}/none/t.md"], "there is no folder"),
        (["{root}", "--out", "{root}/folder.md"], "this is a folder"),
        (["{root}", "--out", "{root}/runs/other/a/t.md"], "is a run directory"),
        (["{root}/empty"], "no runs under"),
        (["{root}", "--paper", "--seeds"], "one at a time"),
        (["{root}", "--papers"], "--paper"),
    ],
)
def test_mistakes(words: list[str], part: str, runs: Path) -> None:
    root = runs.parent
    for name in ("empty", "folder.md"):
        (root / name).mkdir()
    before = sorted(root.rglob("*"))
    assert part in refused(mezo("compare", *(word.replace("{root}", str(root)) for word in words)))
    assert sorted(root.rglob("*")) == before


def test_no_outputs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no folder outputs/ here" in refused(mezo("compare"))
    assert "there is no folder outputs/ here" in refused(mezo("compare", "--objectives"))
    assert mezo("compare", "--paper").code == 0


def test_damaged_runs_are_a_warning_each_and_the_rest_is_shown(runs: Path) -> None:
    (runs / "other" / "a" / "config.yaml").write_text("seed: 1\n")
    said = mezo("compare", runs)
    assert said.code == 0
    assert said.err.count("\n") == 1
    assert said.err.startswith("warning: ")
    assert "91.0 (2.0)" in said.out
    for file in runs.rglob("run.json"):
        file.write_text("{")
    said = mezo("compare", runs)
    assert said.code == 2
    assert said.err.endswith(f"error: no runs under {runs} that can be read\n")
    assert "Traceback" not in said.err


def test_neither_torch_nor_transformers_is_loaded(runs: Path) -> None:
    for flags in ([], ["--paper"], ["--objectives"]):
        code = (
            f"import sys\nsys.argv = {['mezo', 'compare', *flags, str(runs)]!r}\nfrom mezo_cli.cli import main\n"
            "try:\n    main()\nexcept SystemExit as end:\n    print('code', end.code)\n"
            "print('loaded', sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
        assert done.stdout.endswith("code 0\nloaded []\n"), done


# --- end to end ---


def test_real_runs_from_end_to_end(roberta: Path, tmp_path: Path) -> None:
    """A sweep over prepared folders, seeds from their names, by the command line alone."""
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

    assert mezo("compare", tmp_path, "--out", tmp_path / "t.json").code == 0
    found = json.loads((tmp_path / "t.json").read_text())["groups"]
    assert [(g["objective"], g["loss"], g["shots"], g["n"]) for g in found] == [
        ("mlm", "cross_entropy", 4, 2),
        ("mlm", "accuracy", 4, 1),
        ("cls", "cross_entropy", 4, 1),
    ]
    for seed, number in (("13", 0), ("21", 1)):
        jobs = [json.loads(f.read_text()) for f in sorted((tmp_path / "sweep").glob("*/summary.json"))]
        mine = [job for job in jobs if job["train"]["rows"] == 8 + 2 * number]
        best = max(mine, key=lambda job: (job["dev"]["accuracy"], -job["dev"]["loss"]))
        assert found[0]["seeds"][seed]["test"] == pytest.approx(100 * best["test"]["accuracy"], abs=1e-3)
    assert found[1]["missing"] == found[2]["missing"] == [21, 42, 87, 100]

    said = mezo("compare", "--objectives", tmp_path)
    assert said.code == 0, said
    cells = cells_of(said.out)
    assert cells["objective"] == ["mlm", "mlm", "mlm", "cls"]
    assert cells["loss"] == ["cross_entropy", "cross_entropy", "accuracy", "cross_entropy"]
    assert cells["g = 0 in"][2] == "100.0%"
    assert cells["forwards"] == ["6"] * 4
    assert "-" not in cells["train accuracy"]


def test_the_list_of_runs_tells_an_adapter_from_the_whole_model(tmp_path: Path) -> None:
    made(tmp_path / "a", {})
    made(tmp_path / "b", {"peft.name": "lora", "peft.r": 8, "peft.alpha": 16, "peft.targets": "query_value"})
    said = mezo("runs", tmp_path).out.splitlines()
    assert [line.split("mlm")[1].split("roberta")[0].strip() for line in said if "mlm" in line] == ["mezo", "mezo lora"]
