"""The settings of a run: their part in a comparison, the name of the method, what differs from the defaults."""

from typing import Any

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.explain import key_owners
from mezo_cli.report.settings import IN_OTHER_COLUMNS, LIMIT, WITHOUT_EFFECT, changed_settings, method_name
from tests.report.run_directories import make_config, make_entry, only_group

LORA = {"peft.name": "lora", "peft.r": 8, "peft.alpha": 16, "peft.targets": "query_value"}
PREFIX = {"peft.name": "prefix", "peft.length": 5}
MOMENTUM = {"optimizer.name": "mezo_momentum"}
ADAM = {"optimizer.name": "mezo_adam"}
FIRST_ORDER = {"optimizer.name": "adamw", "optimizer.schedule": "linear"}


def test_every_key_of_the_schema_has_exactly_one_part() -> None:
    """A key that is new keeps runs apart until someone says otherwise; nothing is in two parts."""
    entry = make_entry({"data.name": "files", "data.dir": "/data"})
    apart, grid = set(entry.common), set(dict(entry.point))
    assert not apart & grid
    silent = set(key_owners()) - apart - grid
    named = (*WITHOUT_EFFECT, *LIMIT, *IN_OTHER_COLUMNS, "task.hub.")
    of_others = set(key_owners()) - set(entry.settings)  # of choices that the run has not made
    assert {key for key in silent if not key.startswith(named)} == of_others


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "MeZO"),
        ({"steps": 0}, "zero-shot"),
        ({"steps": 0, "init": "linear_probe"}, "LP"),
        ({"init": "linear_probe"}, "LP then MeZO"),
        (FIRST_ORDER, "FT"),
        ({**FIRST_ORDER, "optimizer.name": "sgd", "optimizer.momentum": 0.0}, "FT-SGD"),
        ({**LORA, "optimizer.weight_decay": 0.1}, "MeZO LoRA"),
        ({"peft.name": "head", "init": "linear_probe"}, "LP then MeZO head"),
        (MOMENTUM, "MeZO-momentum"),
        ({**ADAM, **LORA}, "MeZO-Adam LoRA"),
        ({**FIRST_ORDER, **PREFIX}, "FT prefix"),
        ({"objective": "lm", **LORA}, "MeZO LoRA"),
    ],
)
def test_names_of_methods(settings: dict[str, Any], name: str) -> None:
    assert method_name(make_config(settings)) == name
    assert only_group(make_entry(settings)).label == name  # and nothing about it is unusual


def test_only_what_differs_from_the_defaults_is_listed() -> None:
    assert changed_settings(make_config({})) == {}
    changed = changed_settings(build_config(["task=rte", "optimizer=adamw", "steps=5", "optimizer.lr=1e-3"]))
    assert changed.keys() == {"task", "optimizer", "optimizer.lr", "steps"}
    assert (*changed["optimizer.lr"].values(), *changed["steps"].values()) == (1e-3, 1e-5, 5, 100_000)
