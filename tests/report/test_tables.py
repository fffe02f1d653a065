"""The tables of `mezo compare`, on the terminal and as files, and the paper's numbers in them."""

import csv
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from mezo_cli.commands import compare
from mezo_cli.config.choices import CONF
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import to_dict
from mezo_cli.report import paper
from mezo_cli.report.entries import read_runs
from mezo_cli.report.groups import group_runs, unlike_paper
from mezo_cli.report.settings import flatten, method_name, unusual_settings
from mezo_cli.report.tables import csv_text, group_view, paper_view
from mezo_cli.sweep.plan import plan_sweep
from tests.command_line import mezo, ok
from tests.report.run_directories import SEEDS, make_entry, make_grid, make_run, make_two_methods, only_group

FEW = {"data.shots": 16, "model.tie_embeddings": False}


def rows(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


@pytest.fixture(scope="module")
def two_methods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_two_methods(tmp_path_factory.mktemp("two") / "runs")


def test_the_table(two_methods: Path) -> None:
    said = ok("compare", two_methods)
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


def test_the_large_model_table_has_every_number() -> None:
    """The sums of the rows are those of the paper's tables 1, 2 and 3."""
    table = paper.find_table("opt")
    numbers = [[number.mean for number in row.numbers.values()] for row in table.rows]
    assert [len(row) for row in numbers] == [11] * 6 + [1, 11] + [6] * 6
    sums = [586.2, 691.1, 573.3, 763.0, 763.4, 769.9, 78.5, 797.8, 283.0, 400.9, 444.5, 333.5, 406.5, 441.1]
    assert [round(sum(row), 1) for row in numbers] == sums
    assert [table.rows[3].numbers[task].text for task in ("sst2", "boolq", "drop")] == ["91.4", "67.6", "30.9"]
    assert any("63.5 is 66 of 104" in note and note.startswith("WSC") for note in table.notes)
    assert round(6600 / 104, 1) == table.rows[3].numbers["wsc"].mean


EXPERIMENTS = sorted((CONF / "experiment" / "paper").glob("*.yaml"))


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_each_paper_experiment_is_a_row_of_the_table(file: Path) -> None:
    """Nothing about it is unusual, its grid ends where the paper's does, and its head repeats its row."""
    config = build_config([f"experiment=paper/{file.stem}", "task=sst2", "data.shots=16"])
    name, loss, values = method_name(config), config.objective.loss, flatten(to_dict(config))
    assert unusual_settings(config, paper.find_table().usual_settings(name)) == {}
    assert {key: values[key] for key in paper.find_table().settings(name)} == paper.find_table().settings(name)
    swept = yaml.safe_load(file.read_text()).get("hydra", {}).get("sweeper", {}).get("params") or {}
    for key, ends in paper.find_table().grid(name).items():
        points = [float(value) for value in str(swept.get(key, values[key])).split(",")]
        assert (min(points), max(points)) == (min(ends), max(ends)), key
    head = file.read_text().split("defaults:")[0]
    rows = [row for row in paper.find_table().rows if (row.method, row.loss) == (name, loss)]
    assert rows
    for row in rows:
        (line,) = re.findall(rf"^#   {row.shots} shots +(.*)$" if row.shots else r"^# {10,}(\d.*)$", head, re.M)
        assert re.findall(r"[\d.]+(?: \([\d.]+\))?\??", line) == [number.text for number in row.numbers.values()]


@pytest.mark.parametrize(("name", "task"), [("mezo_lora", "drop"), ("icl", "wsc"), ("non_differentiable", "squad")])
def test_a_large_model_experiment_is_a_row_of_its_table(name: str, task: str) -> None:
    """Nothing about it is unusual, and its grid ends where the paper's does, on a task with a grid of its own too."""
    jobs = plan_sweep([f"experiment=paper/opt-13b/{name}", f"task={task}"]).jobs or []
    config, table = jobs[0].config, paper.find_table("opt")
    method, loss, values = method_name(config), config.objective.loss, flatten(to_dict(config))
    assert table.row("opt-13b", None, method, loss, task) is not None
    assert unusual_settings(config, table.usual_settings(method)) == {}
    assert {key: values[key] for key in table.settings(method, loss)} == dict(table.settings(method, loss))
    lrs = [job.config.optimizer.lr for job in jobs]
    if name != "icl":
        assert (min(lrs), max(lrs)) == tuple(table.grid(method, loss, task)["optimizer.lr"])


@pytest.mark.parametrize(
    "other",
    [
        {"data.shots": None},
        {"data.shots": 32},
        {"task": "mr"},
        {"model.path": "FacebookAI/roberta-base"},
        {"model.path": "/models/mine"},  # model.name still says roberta-large
        {"objective": "cls"},
        {"objective.loss": "accuracy"},
        {"data.name": "demo"},
        {"optimizer.name": "mezo_momentum"},
        {"peft.name": "bias"},
    ],
)
def test_no_number_for_another_setup(other: dict[str, Any]) -> None:
    assert only_group(make_entry({**FEW, **other})).paper_number is None


LORA = {"peft.name": "lora", "peft.r": 8, "peft.alpha": 16, "peft.targets": "query_value"}
ROWS: dict[str, dict[str, Any]] = {
    "mezo_lora": {**LORA, "peft.head": True, "optimizer.lr": 5e-5, "optimizer.weight_decay": 0.1},
    "mezo_prefix": {"peft.name": "prefix", "peft.length": 5, "optimizer.lr": 5e-3, "optimizer.eps": 0.1},
    "mezo_adam": {"optimizer.name": "mezo_adam", "optimizer.lr": 1e-5},
}


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"data.shots": 512, "objective.loss": "accuracy"}, "92.7"),
        ({"data.shots": 512}, "93.3 (0.7)"),
        ({"steps": 0}, "79.0"),
        ({"data.name": "files", "data.dir": "/k/SST-2/16-42", "data.shots": None}, "90.5 (1.2)"),
        ({"model.path": "/models/roberta-large"}, "90.5 (1.2)"),
        ({**ROWS["mezo_lora"], "task": "rte", "data.shots": 512}, "77.6 (1.3)"),
        ({**ROWS["mezo_adam"], "task": "rte"}, "59.2 (11.1)?"),
    ],
)
def test_a_number_for_the_same_setup(settings: dict[str, Any], number: str) -> None:
    found = only_group(make_entry({**FEW, **settings})).paper_number
    assert found is not None
    assert found.text == number


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps": 20000}, "steps=20000 not 100000"),
        ({"optimizer.noise": "rademacher"}, "noise=rademacher not gaussian"),
        ({"optimizer.samples": 2}, "samples=2 not 1"),
        ({"optimizer.lr": 1e-4}, "lr=0.0001 not 1e-07 to 1e-05"),
        ({"batch_size": 16}, "batch_size=16 not 64"),
        ({"task.template": "{sentence} {mask}"}, "another prompt"),
        ({"data.eval_limit": 100}, "tested on at most 100 rows"),
        ({}, "1 of 5 data seeds"),
        ({"seed": 1}, "data seeds 1"),
        ({"steps": 0, "data.shots": None}, "tested on all rows, the paper on at most 1000"),
        ({**ROWS["mezo_lora"], "peft.r": 4}, "r=4 not 8"),
        ({**ROWS["mezo_lora"], "peft.head": False}, "head=False not True"),
        ({"model.tie_embeddings": None}, "model.tie_embeddings=null not False"),
        ({**ROWS["mezo_lora"], "optimizer.weight_decay": 0.0}, "weight_decay=0 not 0.1"),
        ({**ROWS["mezo_prefix"], "optimizer.eps": 1e-3}, "eps=0.001 not 0.1"),
        ({**ROWS["mezo_adam"], "optimizer.beta2": 0.99}, "beta2=0.99 not 0.999"),
    ],
)
def test_differences_from_the_paper_are_named(settings: dict[str, Any], named: str) -> None:
    assert named in unlike_paper(only_group(make_entry({**FEW, **settings})))
