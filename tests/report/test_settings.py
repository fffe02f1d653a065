"""The settings of a run: their part in a comparison, and the name of the method."""

from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.keys import all_keys
from mezo_cli.report.read import read_runs
from mezo_cli.report.settings import (
    IN_OTHER_COLUMNS,
    LIMIT,
    WITHOUT_EFFECT,
    flatten,
    grid_settings,
    group_settings,
    method_name,
)
from tests.report.run_directories import default_config, make_config, make_run, only_group, read_groups

LORA = {"peft.name": "lora", "peft.r": 8, "peft.alpha": 16, "peft.targets": "query_value"}
PREFIX = {"peft.name": "prefix", "peft.length": 5}
MOMENTUM = {"optimizer.name": "mezo_momentum"}
ADAM = {"optimizer.name": "mezo_adam"}
FIRST_ORDER = {"optimizer.name": "adamw", "optimizer.schedule": "linear"}


def test_every_key_of_the_schema_has_exactly_one_part(tmp_path: Path) -> None:
    """A key that is new keeps runs apart until someone says otherwise; nothing is in two parts."""
    run = make_run(tmp_path / "a", {"data.name": "files", "data.dir": "/data"})
    (entry,) = read_runs([run.path])[0]
    apart, grid = set(group_settings(entry)), set(grid_settings(entry.config))
    assert not apart & grid
    silent = set(all_keys()) - apart - grid
    named = (*WITHOUT_EFFECT, *LIMIT, *IN_OTHER_COLUMNS, "task.hub.")
    of_others = set(all_keys()) - set(flatten(entry.config))  # of choices that the run has not made
    assert {key for key in silent if not key.startswith(named)} == of_others


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "MeZO"),
        ({"steps": 0}, "zero-shot"),
        ({"steps": 0, "optimizer.name": "linear_probe", "init": "linear_probe"}, "LP"),
        ({"steps": 0, "init": "linear_probe"}, "LP"),
        ({"init": "linear_probe"}, "LP then MeZO"),
        (FIRST_ORDER, "FT"),
        ({**FIRST_ORDER, "optimizer.name": "sgd", "optimizer.momentum": 0.0}, "FT-SGD"),
        ({**FIRST_ORDER, "init": "linear_probe"}, "LP then FT"),
        ({**LORA, "optimizer.weight_decay": 0.1}, "MeZO LoRA"),
        (PREFIX, "MeZO prefix"),
        ({"peft.name": "head"}, "MeZO head"),
        ({"peft.name": "bias"}, "MeZO bias"),
        ({"peft.name": "head", "init": "linear_probe"}, "LP then MeZO head"),
        (MOMENTUM, "MeZO-momentum"),
        (ADAM, "MeZO-Adam"),
        ({**ADAM, **LORA}, "MeZO-Adam LoRA"),
        ({**FIRST_ORDER, **PREFIX}, "FT prefix"),
        ({"objective": "lm", **LORA}, "MeZO LoRA"),
    ],
)
def test_names_of_methods(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    assert method_name(make_config(settings)) == name
    make_run(tmp_path / "a", settings)
    assert only_group(tmp_path).label == name  # and nothing about it is unusual


def test_the_defaults_are_the_papers_so_nothing_is_unusual() -> None:
    assert method_name(default_config()) == "MeZO"


@pytest.mark.parametrize(
    ("method", "setting", "label"),
    [
        ({}, {"optimizer.samples": 4}, "MeZO (samples=4)"),
        (
            {},
            {"optimizer.samples": 4, "optimizer.sample_schedule": "linear"},
            "MeZO (samples=4, sample_schedule=linear)",
        ),
        (LORA, {"peft.r": 4}, "MeZO LoRA (r=4)"),
        (LORA, {"peft.alpha": 8}, "MeZO LoRA (alpha=8)"),
        (LORA, {"peft.targets": "attention_feed_forward"}, "MeZO LoRA (targets=attention_feed_forward)"),
        (PREFIX, {"peft.length": 2}, "MeZO prefix (length=2)"),
        (MOMENTUM, {"optimizer.window": 8}, "MeZO-momentum (window=8)"),
        (MOMENTUM, {"optimizer.momentum": 0.5}, "MeZO-momentum (momentum=0.5)"),
        (ADAM, {"optimizer.beta1": 0.8}, "MeZO-Adam (beta1=0.8)"),
        (ADAM, {"optimizer.beta2": 0.99}, "MeZO-Adam (beta2=0.99)"),
        (ADAM, {"optimizer.adam_eps": 1e-6}, "MeZO-Adam (adam_eps=1e-06)"),
        (
            ADAM,
            {"optimizer.noise": "rademacher", "optimizer.window": 4},
            "MeZO-Adam (noise=rademacher, window=4)",
        ),
    ],
)
def test_an_unusual_setting_of_the_method_splits_groups_and_is_in_the_label(
    method: dict[str, Any], setting: dict[str, Any], label: str, tmp_path: Path
) -> None:
    make_run(tmp_path / "usual", method)
    make_run(tmp_path / "other", {**method, **setting})
    usual = method_name(make_config(method))
    assert [group.label for group in read_groups(tmp_path)] == [usual, label]
