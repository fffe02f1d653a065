"""The paper's numbers, and the groups of runs that they are compared with."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezo_cli.config.choices import CONF
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import to_dict
from mezo_cli.report import paper
from mezo_cli.report.groups import unlike_paper
from mezo_cli.report.settings import flatten, method_name, unusual_settings
from mezo_cli.sweep.plan import plan_sweep
from tests.report.run_directories import make_entry, only_group

FEW = {"data.shots": 16, "model.tie_embeddings": False}


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
