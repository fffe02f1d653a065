"""The paper's numbers, and the groups of runs that they are compared with."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezo_cli.config.choices import conf_dir
from mezo_cli.config.compose import build_config
from mezo_cli.report import paper
from mezo_cli.report.aggregate import Group, group_runs, unlike_paper
from mezo_cli.report.read import read_runs
from mezo_cli.report.settings import (
    flatten,
    method_name,
    unusual_settings,
)
from tests.command_line import mezo
from tests.report.run_directories import SEEDS, make_grid, make_run

FEW = {"data.shots": 16}


def only_group(root: Path) -> Group:
    (group,) = group_runs(read_runs([root])[0])
    return group


def test_the_table_has_every_number() -> None:
    table = paper.paper()
    assert [(row.shots, row.label) for row in table.rows] == [
        (0, "zero-shot"),
        *((k, name) for k in (16, 512) for name in ("LP", "MeZO", "MeZO LoRA", "MeZO prefix", "MeZO-Adam", "FT")),
        (512, "MeZO (accuracy)"),
    ]
    assert [len(row.numbers) for row in table.rows] == [6] * 13 + [4]
    assert all(20 < number.mean < 100 for row in table.rows for number in row.numbers.values())
    uncertain = [(row.shots, row.method, task) for row in table.rows for task, n in row.numbers.items() if n.uncertain]
    assert uncertain == [(16, "MeZO-Adam", "mnli"), (16, "MeZO-Adam", "rte")]
    assert [n.std is None for row in table.rows for n in row.numbers.values()] == [True] * 6 + [False] * 72 + [True] * 4


@pytest.mark.parametrize(
    ("task", "shots", "method", "loss", "number"),
    [
        ("sst2", 0, "zero-shot", "cross_entropy", "79.0"),
        ("trec", 16, "LP", "cross_entropy", "51.3 (5.5)"),
        ("rte", 16, "MeZO-Adam", "cross_entropy", "59.2 (11.1)?"),
        ("snli", 16, "MeZO prefix", "cross_entropy", "71.6 (2.5)"),
        ("mnli", 512, "MeZO", "cross_entropy", "78.3 (0.5)"),
        ("sst5", 512, "FT", "cross_entropy", "55.9 (0.9)"),
        ("trec", 512, "MeZO", "accuracy", "68.6"),
    ],
)
def test_numbers(task: str, shots: int, method: str, loss: str, number: str) -> None:
    row = paper.paper().row(shots, method, loss)
    assert row is not None
    assert str(row.numbers[task]) == number


def test_numbers_that_the_paper_does_not_have() -> None:
    row = paper.paper().row(512, "MeZO", "accuracy")
    assert row is not None
    assert "rte" not in row.numbers
    assert paper.paper().row(16, "MeZO", "accuracy") is None
    assert paper.paper().row(32, "MeZO", "cross_entropy") is None


EXPERIMENTS = sorted((conf_dir() / "experiment" / "paper").glob("*.yaml"))


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_each_paper_experiment_is_a_row_of_the_table(file: Path) -> None:
    """Nothing about it is unusual, and its grid ends where the paper's does."""
    made = build_config([f"experiment=paper/{file.stem}", "task=sst2", "data.shots=16"])
    name, given = method_name(made), flatten(made)
    assert name in {row.method for row in paper.paper().rows}
    assert unusual_settings(made, paper.paper().usual_settings(name)) == {}
    assert {key: given[key] for key in paper.paper().settings(name)} == paper.paper().settings(name)
    swept = yaml.safe_load(file.read_text()).get("hydra", {}).get("sweeper", {}).get("params") or {}
    for key, ends in paper.paper().grid(name).items():
        values = [float(value) for value in str(swept.get(key, given[key])).split(",")]
        assert (min(values), max(values)) == (min(ends), max(ends)), key


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_the_head_of_an_experiment_repeats_its_row(file: Path) -> None:
    name = method_name(build_config([f"experiment=paper/{file.stem}", "data.shots=16"]))
    head = file.read_text().split("defaults:")[0]
    rows = [row for row in paper.paper().rows if row.label == name]
    assert rows
    for row in rows:
        (line,) = re.findall(rf"^#   {row.shots} shots +(.*)$" if row.shots else r"^# {10,}(\d.*)$", head, re.M)
        assert re.findall(r"[\d.]+(?: \([\d.]+\))?\??", line) == [str(number) for number in row.numbers.values()]


def test_the_difference_is_in_points(tmp_path: Path) -> None:
    make_grid(tmp_path, FEW, {1e-6: dict.fromkeys(SEEDS, (0.5, 0.91))})
    group = only_group(tmp_path)
    number = group.paper_number
    assert number is not None
    assert number.mean == 90.5
    assert group.difference == pytest.approx(0.5)
    assert unlike_paper(group) == []
    assert "90.5 (1.2) +0.5" in mezo("compare", tmp_path).out.replace("  ", " ")


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
        {"data.name": "demo", "data.shots": None},
        {"data.name": "demo"},
    ],
)
def test_no_number_for_another_setup(other: dict[str, Any], tmp_path: Path) -> None:
    make_run(tmp_path / "a", {**FEW, **other})
    assert only_group(tmp_path).paper_number is None
    assert "paper" not in mezo("compare", tmp_path).out


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"data.shots": 512, "objective.loss": "accuracy"}, "92.7"),
        ({"data.shots": 512}, "93.3 (0.7)"),
        ({"steps": 0}, "79.0"),
        ({"data.name": "files", "data.dir": "/k/SST-2/16-42", "data.shots": None}, "90.5 (1.2)"),
        ({"model.path": "/models/roberta-large"}, "90.5 (1.2)"),
        ({"task": "trec"}, "76.9 (2.7)"),
    ],
)
def test_a_number_for_the_same_setup(settings: dict[str, Any], number: str, tmp_path: Path) -> None:
    make_run(tmp_path / "a", {**FEW, **settings})
    assert str(only_group(tmp_path).paper_number) == number


@pytest.mark.parametrize(
    ("settings", "said"),
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
    ],
)
def test_differences_from_the_paper_are_noted(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_run(tmp_path / "a", {**FEW, **settings})
    assert said in unlike_paper(only_group(tmp_path))
    out = mezo("compare", tmp_path).out
    assert "-40.5 *" in out
    assert f"* unlike the paper: {'; '.join(unlike_paper(only_group(tmp_path)))}" in out


ROWS = {
    "mezo_lora": {
        "peft.name": "lora",
        "peft.r": 8,
        "peft.alpha": 16,
        "peft.targets": "query_value",
        "optimizer.lr": 5e-5,
        "optimizer.weight_decay": 0.1,
    },
    "mezo_prefix": {"peft.name": "prefix", "peft.length": 5, "optimizer.lr": 5e-3, "optimizer.eps": 0.1},
    "mezo_adam": {"optimizer.name": "mezo_adam", "optimizer.lr": 1e-5},
}


@pytest.mark.parametrize(
    ("name", "task", "shots", "number"),
    [
        ("mezo_lora", "sst2", 16, "91.4 (0.9)"),
        ("mezo_lora", "rte", 512, "77.6 (1.3)"),
        ("mezo_prefix", "trec", 16, "80.3 (3.6)"),
        ("mezo_prefix", "sst2", 512, "93.3 (0.1)"),
        ("mezo_adam", "snli", 16, "74.1 (2.7)"),
        ("mezo_adam", "rte", 16, "59.2 (11.1)?"),
    ],
)
def test_runs_of_an_experiment_get_the_papers_number(
    name: str, task: str, shots: int, number: str, tmp_path: Path
) -> None:
    built = flatten(build_config([f"experiment=paper/{name}", f"task={task}", f"data.shots={shots}"]))
    assert {key: built[key] for key in ROWS[name]} == ROWS[name]
    for seed in SEEDS:
        make_run(tmp_path / str(seed), {**ROWS[name], "task": task, "data.shots": shots, "seed": seed}, test=0.7)
    group = only_group(tmp_path)
    assert str(group.paper_number) == number
    assert unlike_paper(group) == []
    mine = mezo("compare", tmp_path).out.splitlines()
    assert any(f"{group.label} " in line and number in line and "*" not in line for line in mine)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("mezo_lora", {"peft.r": 4}, "r=4 not 8"),
        ("mezo_lora", {"optimizer.weight_decay": 0.0}, "weight_decay=0 not 0.1"),
        ("mezo_prefix", {"peft.length": 2}, "length=2 not 5"),
        ("mezo_prefix", {"optimizer.eps": 1e-3}, "eps=0.001 not 0.1"),
        ("mezo_adam", {"optimizer.beta2": 0.99}, "beta2=0.99 not 0.999"),
        ("mezo_adam", {"optimizer.noise": "rademacher", "optimizer.window": 8}, "window=8 not null"),
    ],
)
def test_differences_from_the_experiment_are_noted(
    name: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_run(tmp_path / "a", {**FEW, **ROWS[name], **settings})
    assert said in unlike_paper(only_group(tmp_path))


@pytest.mark.parametrize(
    "settings", [{"optimizer.name": "mezo_momentum"}, {"peft.name": "head"}, {"peft.name": "bias"}]
)
def test_a_method_that_is_not_in_the_paper_gets_no_number(settings: dict[str, Any], tmp_path: Path) -> None:
    make_run(tmp_path / "a", {**FEW, **settings})
    assert only_group(tmp_path).paper_number is None
    assert "yours: MeZO" in mezo("compare", "--paper", tmp_path).out


def test_zero_shot_on_all_rows_is_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"steps": 0})
    assert unlike_paper(only_group(tmp_path)) == ["tested on all rows, the paper on at most 1000"]
