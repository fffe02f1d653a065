"""The tables of `mezo compare`, on the terminal and as files: groups, the paper's table, objectives run by run."""

import csv
import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mezo_cli.commands import compare
from mezo_cli.report.entries import read_runs
from mezo_cli.report.groups import group_runs
from mezo_cli.report.output import csv_text
from mezo_cli.report.tables import group_view, paper_view
from tests.command_line import mezo
from tests.report.run_directories import SEEDS, make_entry, make_grid, make_run

FEW = {"data.shots": 16, "model.tie_embeddings": False}


def rows(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


def test_the_table(two_methods: Path) -> None:
    said = mezo("compare", two_methods)
    assert said.code == 0, said
    assert rows(said.out)[:4] == [
        "roberta-large, mlm, cross_entropy",
        "task shots method chosen steps seeds dev test paper diff",
        "sst2 16 MeZO lr=1e-06 or lr=1e-07 100000 5 82.0 91.0 (2.0) 90.5 (1.2) +0.5",
        "sst2 16 MeZO (noise=rademacher) - 100000 1 70.0 60.0 90.5 (1.2) -30.5 *",
    ]
    for note in ("seed 21 failed (the disk | is full)", "noise=rademacher not gaussian; 1 of 5 data seeds"):
        assert note in " ".join(said.out.split())


def test_without_a_number_of_the_paper_it_has_no_column() -> None:
    (table,) = group_view(group_runs([make_entry({"data.name": "demo"})])).tables
    assert "paper" not in table


@pytest.mark.parametrize("width", [80, 140])
def test_the_tables_fit_the_terminal(width: int, two_methods: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "make_console", lambda: Console(width=width, file=sys.stdout))
    out = mezo("compare", two_methods).out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= width
    for number in ("90.5 (1.2)", "91.0 (2.0)", "-30.5 *"):
        assert number in out


def test_own_results_are_below_the_papers_rows() -> None:
    runs = make_grid(FEW, {1e-6: dict.fromkeys(SEEDS, (0.5, 0.91))})
    runs += make_grid({**FEW, "task": "trec"}, {1e-6: {13: (0.5, 0.75)}})
    short = {**FEW, "optimizer.noise": "rademacher", "steps": 9}
    runs += make_grid(short, {1e-6: dict.fromkeys(SEEDS, (0.5, 0.9))})
    runs += make_grid({**FEW, "model.path": "distilroberta"}, {1e-6: dict.fromkeys(SEEDS, (0.5, 0.8))})
    runs += make_grid({"task": "mr"}, {1e-6: {13: (0.5, 0.5)}})
    view = paper_view(group_runs(runs), 140)
    (table,) = view.tables
    lines = [" ".join(" ".join(row[1:]).split()) for row in table.to_numpy()]
    at = lines.index("MeZO 90.5 (1.2) 45.5 (2.0) 68.5 (3.9) 58.7 (2.5) 64.0 (3.3) 76.9 (2.7)")
    assert lines[at + 1 : at + 5] == [
        "yours 91.0 (0.0) - - - - 75.0 1/5",
        "difference +0.5 -1.9",
        "yours: noise=rademacher, steps=9 90.0 (0.0) - - - - -",
        "difference -0.5",
    ]
    assert "yours: MeZO, distilroberta, steps=100000 80.0 (0.0) - - - - -" in lines
    assert any(note.startswith("1 group of other tasks") for note in view.notes)
    assert [table.shape[1] for table in paper_view([], 80).tables] == [5, 5]
    cells = view.document["cells"]
    mine = [cell for cell in cells if cell["n"] and cell["row"] == "MeZO, k=16" and cell["task"] == "sst2"]
    assert (mine[0]["test_mean"], mine[0]["difference"]) == (91.0, 0.5)
    assert {cell["paper_uncertain"] for cell in cells if cell["row"]} == {True, False}


def test_the_large_model_table_has_own_results_picked_by_the_dev_loss() -> None:
    opt = {"model.path": "facebook/opt-13b", "metric": "loss", "steps": 20_000, "objective": "lm", "seed": 0}
    runs = [
        make_entry({**opt, "optimizer.lr": 1e-6}, dev=0.9, dev_loss=0.7, test=0.8),
        make_entry({**opt, "optimizer.lr": 1e-7}, dev=0.6, dev_loss=0.5, test=0.9),
        make_entry({**opt, "task": "rte", "task.demonstrations": 32, "steps": 0}, test=0.6),
        make_entry({**opt, "model.path": "facebook/opt-6.7b"}),
    ]
    view = paper_view(group_runs(runs), 150, "opt")
    (table,) = view.tables
    lines = [" ".join(" ".join(row).split()) for row in table.to_numpy()]
    at = lines.index("MeZO 91.4 66.1 67.9 67.6 63.5 61.1 60.1 88.0 81.7 84.7 30.9")
    assert lines[at + 1 : at + 3] == ["yours 90.0 - - - - - - - - - -", "difference -1.4"]
    at = lines.index("ICL 87.0 62.1 57.1 66.9 39.4 50.5 53.1 87.0 82.5 75.9 29.6")
    assert lines[at + 1] == "yours - 60.0 - - - - - - - - -"
    assert any("66 of 104" in note for note in view.notes)
    assert any(note.startswith("1 group of other") for note in view.notes)
    assert all(part.shape[1] - 2 <= 4 for part in paper_view([], 80, "opt").tables)


def test_a_cell_that_a_spreadsheet_would_run_is_quoted() -> None:
    values = ["=1", "+1", "-1", "@a", "\t=1", "a=1", -1.5]
    assert csv_text([{"cell": value} for value in values]).split("\n") == [
        *("cell", "'=1", "'+1", "'-1", "'@a", "'\t=1", "a=1", "-1.5", "")
    ]


def test_csv(two_methods: Path, tmp_path: Path) -> None:
    def written(*words: object) -> list[dict[str, str]]:
        assert mezo("compare", *words, "--out", tmp_path / "t.csv").code == 0
        with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    first, second = written(two_methods)
    assert (first["method"], first["n"], first["test_mean"], first["test_std"]) == ("MeZO", "5", "91.0", "2.0")
    assert (first["paper_mean"], first["paper_std"], first["difference"]) == ("90.5", "1.2", "0.5")
    assert (second["label"], second["test_std"]) == ("MeZO (noise=rademacher)", "")
    assert (second["seeds"], second["missing"]) == ("13", "21 42 87 100")
    assert "failed (the disk | is full)" in second["troubles"]


def test_json(two_methods: Path) -> None:
    first, second = json.loads(mezo("compare", two_methods, "--json").out)["groups"]
    assert (first["n"], first["test_mean"], first["test_std"], first["paper_mean"]) == (5, 91.0, 2.0, 90.5)
    assert [first["seeds"][seed]["picked"]["optimizer.lr"] for seed in ("13", "21")] == [1e-7, 1e-6]
    assert all(Path(run).is_dir() for seed in first["seeds"].values() for run in seed["runs"])
    assert second["missing"] == [21, 42, 87, 100]
    assert second["settings"]["optimizer.noise"] == "rademacher"


def test_a_file_is_written_whole_or_not(two_methods: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "t.csv"
    out.write_text("the old one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = mezo("compare", two_methods, "--out", out)
    assert result.code == 1
    assert f"--out {out}" in result.err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("t.csv", "the old one")]


def test_what_a_step_costs_is_shown_where_it_differs(tmp_path: Path) -> None:
    for name, peak in {"mezo": 1.0, "mezo_momentum": 1.1, "mezo_adam": 2.5}.items():
        run = make_run(tmp_path / name, {"optimizer.name": name}, grads=[0.1] * 100)
        run.write_summary({**run.read_summary(), "seconds": 50.0, "peak_memory_bytes": int(peak * 1e9)})
        run.update(ends=run.ends())
    entries, _ = read_runs([tmp_path])
    (table,) = group_view(group_runs(entries)).tables
    assert sorted(table["peak GB"]) == ["1", "1.1", "2.5"]
    assert "s/step" not in table
