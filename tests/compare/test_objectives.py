"""Objectives run beside run: who may stand beside whom, and what must be seen."""

import csv
import json
from pathlib import Path

import pytest

from mezo_cli.compare import collect, facts
from tests.compare.made import cells_of, made
from tests.door import mezo, refused


def titles(out: str) -> list[str]:
    return [block.splitlines()[0] for block in out.split("\n\n") if block.startswith("sst2, ")]


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """mlm and cls, each by cross-entropy and by accuracy, on one split."""
    root, still = tmp_path / "runs", {"objective.loss": "accuracy"}
    made(root / "d", {"objective": "cls", **still}, grads=[0.0] * 4, predicted=(0, 10))
    made(root / "c", {"objective": "cls"}, test=0.6, grads=[1.0, -2.0, 0.5], predicted=(1, 39))
    made(root / "b", still, test=0.7, grads=[0.0, 0.0, -0.5, 0.0])
    made(root / "a", test=0.9, grads=[1.0, -3.0, 2.0, 0.5], predicted=(4, 6))
    return root


def test_the_four_side_by_side(four: Path) -> None:
    said = mezo("compare", "--objectives", four)
    assert said.code == 0, said
    table = cells_of(said.out)
    assert titles(said.out) == ["sst2, roberta-large, all, seed 42, data rows-42-"]
    assert table["objective"] == ["mlm", "mlm", "cls", "cls"]
    assert table["loss"] == ["cross_entropy", "accuracy", "cross_entropy", "accuracy"]
    assert table["g = 0 in"] == ["0.0%", "75.0%", "0.0%", "100.0%"]
    assert table["|g| mean"] == ["1.62", "0.125", "1.17", "0"]
    assert table["|g| least"] == ["0.5", "0", "0.5", "0"]
    assert table["|g| greatest"] == ["3", "0.5", "2", "0"]
    assert table["train loss, first"] == ["0.7000"] * 4
    assert table["train loss, last"] == ["0.6700", "0.6700", "0.6800", "0.6700"]
    assert table["train accuracy"] == ["90.0"] * 4
    assert table["dev accuracy"] == ["50.0"] * 4
    assert table["test accuracy"] == ["90.0", "70.0", "60.0", "50.0"]
    assert table["says negative"] == ["40.0%", "50.0%", "2.5%", "0.0%"]
    assert table["says positive"] == ["60.0%", "50.0%", "97.5%", "100.0%"]
    assert table["one answer?"] == ["no", "no", "NEARLY", "positive", "ALL", "positive"]
    assert table["forwards"] == ["200000"] * 4
    assert table["time"] == ["9", "s"] * 4
    assert said.out.split("\n\n")[1].splitlines() == [
        "- mlm accuracy, lr=1e-06: g is exactly 0 in 75.0% of all steps, which move nothing",
        "- cls cross_entropy, lr=1e-06: gives 97.5% of test rows the label positive",
        "- cls accuracy, lr=1e-06: gives every test row the label positive",
        "- cls accuracy, lr=1e-06: g is exactly 0 in 100.0% of all steps, which move nothing",
    ]


def test_all_steps_count_not_only_the_logged_ones(tmp_path: Path) -> None:
    run = made(tmp_path / "a", grads=[0.0, 1.0, 0.0, 0.0])
    run.cut_metrics(2)
    (entry,), _ = collect.collect([tmp_path])
    seen = facts.facts_of(entry)
    assert seen is not None
    assert (seen.zero, seen.size) == (0.75, (0.25, 0.0, 1.0))


@pytest.mark.parametrize(
    ("settings", "rows", "tables", "other_rows"),
    [
        ({}, "rows", 1, False),
        ({"optimizer.lr": 1e-5, "batch_size": 8}, "rows", 1, False),
        ({"optimizer.noise": "rademacher"}, "rows", 1, False),
        ({"seed": 7, "data.seed": 42}, "rows", 2, False),
        ({"model.path": "other"}, "rows", 2, False),
        ({"data.seed": 7}, "rows", 2, True),
        ({}, "others", 2, True),
    ],
)
def test_only_the_same_rows_seed_and_model_stand_side_by_side(
    settings: dict[str, object], rows: str, tables: int, other_rows: bool, tmp_path: Path
) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b", {"objective.loss": "accuracy", **settings}, rows=rows)
    out = mezo("compare", "--objectives", tmp_path).out
    assert len(titles(out)) == tables
    assert ("only runs on the same rows, with the same seed and from the same model" in out) == (tables == 2)
    assert ("one objective and one loss each" in out) == (tables == 2)
    assert ("sst2, seed 42: the runs had different rows (data" in out) == other_rows


def test_runs_without_another_objective_beside_them_are_counted(four: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        made(four / f"alone{seed}", {"seed": seed})
    out = mezo("compare", "--objectives", four).out
    assert len(titles(out)) == 1
    assert "- not shown: 2 runs without another objective or loss beside" in out


def test_over_the_seeds(tmp_path: Path) -> None:
    for seed, test in ((13, 0.7), (21, 0.9)):
        made(tmp_path / f"a{seed}", {"seed": seed}, test=test, grads=[1.0, 0.0])
        still = {"seed": seed, "objective.loss": "accuracy"}
        made(tmp_path / f"b{seed}", still, grads=[0.0, 0.0], predicted=(0, 10) if seed == 13 else (4, 6))
    out = mezo("compare", "--objectives", tmp_path).out
    assert len(titles(out)) == 3
    lines = [" ".join(line.split()) for line in out.splitlines()]
    at = lines.index("sst2, roberta-large, all, over the seeds above")
    assert lines[at + 1 : at + 4] == [
        "objective method runs g = 0 |g| train dev test one answer",
        "mlm cross_entropy MeZO, lr=1e-06 2 50.0% 0.5 90.0 50.0 80.0 (10.0) 0 of 2",
        "mlm accuracy MeZO, lr=1e-06 2 100.0% 0 90.0 50.0 50.0 (0.0) 1 of 2",
    ]


def test_the_settings_by_which_runs_differ_are_rows_of_their_own(tmp_path: Path) -> None:
    made(tmp_path / "a", start="2026-01-01")
    made(tmp_path / "b", {"optimizer.noise": "rademacher", "batch_size": 8}, start="2026-01-02")
    table = cells_of(mezo("compare", "--objectives", tmp_path).out)
    assert (table["noise"], table["batch_size"]) == (["gaussian", "rademacher"], ["64", "8"])
    assert "eps" not in table


def test_another_metric_is_told_beside_accuracy(tmp_path: Path) -> None:
    made(tmp_path / "a", {"task": "mrpc"}, test=0.8)
    assert cells_of(mezo("compare", "--objectives", tmp_path).out)["test f1"] == ["80.0"]


def test_unfinished_runs_are_told_as_such(tmp_path: Path) -> None:
    made(tmp_path / "a", start="2026-01-01")
    made(tmp_path / "b", {"steps": 9}, ended="the loss is not finite", grads=[1.0, 2.0], start="2026-01-02")
    said = mezo("compare", "--objectives", tmp_path)
    table = cells_of(said.out)
    assert (table["status"], table["steps"]) == (["finished", "failed"], ["100000", "2"])
    assert (table["test accuracy"], table["answers on"]) == (["50.0", "-"], ["test", "dev"])
    assert "mlm cross_entropy, lr=1e-06: failed (the loss is not finite)" in said.out


def test_a_damaged_trajectory_is_one_line(four: Path) -> None:
    file = four / "a" / "trajectory.bin"
    file.write_bytes(b"X" + file.read_bytes()[1:])
    said = mezo("compare", "--objectives", four)
    assert said.code == 0
    assert cells_of(said.out)["objective"] == ["mlm", "cls", "cls"]
    assert "a is left out: " in said.out
    assert "does not begin as a trajectory does" in said.out


def test_nothing_evaluated_yet(tmp_path: Path) -> None:
    run = made(tmp_path / "a", ended="interrupted")
    (run.path / "metrics.jsonl").unlink()
    assert "no run here has been evaluated yet" in refused(mezo("compare", "--objectives", tmp_path))


def test_as_files(four: Path, tmp_path: Path) -> None:
    for ending in ("md", "csv", "json"):
        assert mezo("compare", "--objectives", four, "--out", tmp_path / f"t.{ending}").code == 0
    runs = json.loads((tmp_path / "t.json").read_text())["runs"]
    assert [run["zero_fraction"] for run in runs] == [0.0, 0.75, 0.0, 1.0]
    assert [run["one_answer"] for run in runs] == [None, None, "positive", "positive"]
    assert runs[0]["predicted"] == {"negative": 4, "positive": 6}
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["test_accuracy"] for line in lines] == ["90.0", "70.0", "60.0", "50.0"]
    assert lines[0]["predicted"] == "negative:4 positive:6"
    assert "| g = 0 in | 0.0% | 75.0% | 0.0% | 100.0% |" in (tmp_path / "t.md").read_text()


def test_a_narrow_terminal_gets_the_runs_in_several_tables(four: Path) -> None:
    from mezo_cli.compare.objectives import objectives

    entries, _ = collect.collect([four])
    assert [len(sheet.columns) for sheet in objectives(entries, 80).sheets] == [5]
    narrow = objectives(entries, 60).sheets
    assert [len(sheet.columns) for sheet in narrow] == [3, 3]
    assert narrow[1].title.endswith(", continued")
