"""What differs from the defaults, and the commands: composing the command gives the run's config."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.report.rerun import changed_settings, commands, train_command
from tests.report.run_directories import make_config

OWN_TASK = [
    "task.name=tone",
    "task.template='say \"{text}\": {mask}'",
    "task.columns=[text]",
    r"task.labels=['so, so','it\'s']",
    "task.label_words=['1','null']",
    "+task.rename.tekst=text",
]


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=demo", "logger=tensorboard"],
        ["task=mnli", "~task.rename.sentence1", "++task.rename.gold_label=gold", "peft=lora", "optimizer=mezo_adam"],
        [*OWN_TASK, "data=files", "data.dir='/tmp/with space, and comma'"],
        ["model=gpt2", "objective=lm", "optimizer=adamw", "init=linear_probe", "max_seconds=2.5", "steps=3"],
    ],
    ids=["demo", "pairs", "own", "decoder"],
)
@pytest.mark.usefixtures("installed_loggers")
def test_the_command_gives_the_same_config(overrides: Sequence[str]) -> None:
    config = build_config(overrides)
    mezo, train, *words = shlex.split(train_command(config))
    assert (mezo, train) == ("mezo", "train")
    assert build_config(words) == config


def test_only_what_differs_is_listed() -> None:
    assert changed_settings(make_config({})) == []
    found = [one.texts() for one in changed_settings(build_config(["task=rte", "steps=5", "optimizer.lr=1e-3"]))]
    assert found == [("task", "rte", "sst2"), ("optimizer.lr", "0.001", "1e-06"), ("steps", "5", "100000")]


def names(status: str, settings: Mapping[str, Any] = {}, best: int | None = 4) -> list[str]:
    return [name for name, _ in commands(make_config({"steps": 9, **settings}), "a run", status, best)]


def test_the_commands_depend_on_how_the_run_ended() -> None:
    again, rebuild = "Run again", "Rebuild the weights of a step"
    assert names("finished")[:4] == [again, "Train longer", rebuild, "Evaluate"]
    assert names("interrupted") == [again, "Resume", rebuild]
    assert names("running") == [again, rebuild]
    assert names("failed", best=None) == [again, "Resume"]
    assert commands(make_config({"steps": 9}), "x", "finished", 4, resumable=False)[1][0] == rebuild
    shared = dict(commands(make_config({"data.name": "files"}), "x", "finished", 4, resumable=False))
    assert shared["Evaluate"] == "mezo eval x --split test data.dir=DIR"
    assert shared["Run again"].endswith(" data.dir=DIR")
    assert "Train longer" not in names("finished", {"optimizer.schedule": "linear"})
    assert rebuild not in names("finished", {"optimizer.name": "adamw"})
    assert dict(commands(make_config({"steps": 9}), "a run", "finished", 4))[rebuild].startswith("mezo replay 'a run'")
