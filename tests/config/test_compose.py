"""Overrides and YAML files are composed into a validated config."""

import dataclasses
import math
import re
import typing
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from mezo_cli.config import keys
from mezo_cli.config.compose import build_config, compose_run
from mezo_cli.config.schema import Config, OptimizerConfig, Setting
from mezo_cli.config.sweep_plan import plan_sweep
from mezo_cli.config.validation import CHOICES, build, check_value, defaults
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS, all_settings


def error_of(*words: str, multirun: bool = False, config_dir: Path | None = None) -> str:
    """The line that refuses the overrides."""
    compose_them: Any = plan_sweep if multirun else compose_run
    with pytest.raises(UserError) as error:
        compose_them(words, None if config_dir is None else str(config_dir))
    line = str(error.value)
    assert "\n" not in line
    return line


def test_the_defaults_are_the_papers() -> None:
    made = build_config([])
    assert (made.task.name, made.objective.name, made.optimizer.name) == ("sst2", "mlm", "mezo")
    assert (made.model.name, made.model.dtype, made.peft.name) == ("roberta-large", "float32", "none")
    assert (made.data.name, made.data.shots, made.data.seed) == ("hub", None, 42)
    assert (made.optimizer.lr, made.optimizer.eps, made.optimizer.weight_decay) == (1e-6, 1e-3, 0.0)
    assert (made.optimizer.noise, made.optimizer.schedule, made.optimizer.samples) == ("gaussian", "constant", 1)
    assert (made.seed, made.steps, made.batch_size) == (42, 100_000, 64)
    assert (made.eval_every, made.log_every, made.log_interval, made.checkpoint) == (10_000, None, 100, "full")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["steps=5"], "steps", 5),
        (["++steps=5"], "steps", 5),
        (["steps='5'"], "steps", 5),
        (["steps=${seed}"], "steps", 42),
        (["optimizer.lr=1"], "optimizer.lr", 1.0),
        (["optimizer.lr=1e-5"], "optimizer.lr", 1e-5),
        (["task.label_words=[Yes,No]"], "task.label_words", ["Yes", "No"]),
        (["task.labels=[0,1]"], "task.labels", ["0", "1"]),
        (["+task.rename.a=b"], "task.rename", {"a": "b"}),
        (["task=rte", "++task.rename.sentence1=b"], "task.rename", {"sentence1": "b", "sentence2": "hypothesis"}),
        (["task=rte", "~task.rename.sentence1"], "task.rename", {"sentence2": "hypothesis"}),
        (["task.first_limit=null"], "task.first_limit", None),
        (["task.template='{sentence} It was {mask}!'"], "task.template", "{sentence} It was {mask}!"),
        (["task.template='{sentence} costs \\${mask}.'"], "task.template", "{sentence} costs ${mask}."),
        (["seed=7"], "data.seed", 7),
        (["seed=7", "data.seed=3"], "data.seed", 3),
    ],
)
def test_valid_overrides_reach_the_config(words: list[str], key: str, value: Any) -> None:
    made: Any = build_config(words)
    for part in key.split("."):
        made = getattr(made, part)
    assert made == value
    assert type(made) is type(value)


def numbers(kind: Any = Config, prefix: str = "") -> list[tuple[str, Any, Setting]]:
    """Every number of the schema: key, type, range."""
    if kind is OptimizerConfig:
        kinds = {key: keys.plain_type(setting.type) for key, setting in all_settings().items()}
        return [(f"{prefix}{key}", kinds[key], all_settings()[key]) for key in kinds if kinds[key] in (int, float)]
    found = []
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        inner = keys.plain_type(hints[item.name])
        if dataclasses.is_dataclass(inner):
            found += numbers(inner, f"{prefix}{item.name}.")
        elif inner in (int, float):
            limits = {name: limit for name, limit in item.metadata.items() if name != "of"}
            found.append((f"{prefix}{item.name}", inner, Setting(item.name, hints[item.name], None, **limits)))
    return found


@pytest.mark.parametrize(("key", "kind", "setting"), numbers())
def test_every_number_has_a_range_that_is_kept(key: str, kind: Any, setting: Setting) -> None:
    low, above, high = setting.low, setting.above, setting.high
    assert low is not None or above is not None
    outside = [math.nan, math.inf, -math.inf]
    outside += [low - 1] if low is not None else [above]
    outside += [high * 2] if high is not None else []
    for value in outside:
        *groups, name = key.split(".")
        plain: Any = {name: value}
        for group in reversed(groups):
            plain = {group: plain}
        with pytest.raises(UserError, match=f"^{key}=.*out of range, allowed is"):
            build(merged(defaults(), plain))
    for value in (low, high):
        if value is not None:
            assert check_value(key, kind(value), setting) == value


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Lay `other` over `one`; what the schema demands is given."""
    given = {"name": "mezo", "path": "x"}
    made = {k: given.get(k, "x") if v == "???" else v for k, v in one.items()}
    for key, value in other.items():
        made[key] = merged(made[key], value) if isinstance(value, dict) else value
    names = {"objective": "mlm", "optimizer": "mezo", "peft": "none", "data": "hub"}
    for group, name in names.items():
        if group in made:
            made[group] = {**made[group], "name": name}
    if "task" in made:
        made["task"] = {**made["task"], "name": "x", "template": "x"}
        made["model"] = {**made["model"], "name": "x", "path": "x"}
    return made


def metadata(key: str) -> tuple[Any, Any]:
    """Return the choices of a key, and the choices of its group that alone have it, as `schema.Owners`."""
    if key.startswith("optimizer.") and key != "optimizer.name":
        return all_settings()[key.removeprefix("optimizer.")].choices, None
    if key in CHOICES:
        return list(CHOICES[key].built_in), None
    kind: Any = Config
    for part in key.split("."):
        item = next(f for f in dataclasses.fields(kind) if f.name == part)
        kind = keys.plain_type(typing.get_type_hints(kind)[part])
    return item.metadata.get("choices"), item.metadata.get("of")


def test_cuda_graphs_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^model.cuda_graphs=true: .*not been tried on a GPU yet; allowed is false$"):
        build_config(["model.cuda_graphs=true"])
    with pytest.raises(UserError, match=r"model.cuda_graphs=1: allowed are true, false"):
        build_config(["model.cuda_graphs=1"])
    assert build_config(["model.paired_tokens=0"]).model.paired_tokens == 0


def test_every_key_can_be_overridden() -> None:
    """A key that the schema has but Hydra's nodes lack would be refused as unknown."""
    plain = {key for key in keys.all_keys() if keys.container(key) is None}
    samples = {"int": "3", "float": "0.5"}
    kinds = {key: kind.__name__ for key, kind, _ in numbers()}
    words = []
    for key in sorted(plain):
        allowed, owners = metadata(key)
        word = f"{key}={allowed[-1] if allowed else samples.get(kinds.get(key, ''), 'word')}"
        if owners:
            for owner in owners.choices:
                build_config([f"{key.split('.')[0]}={owner}", word, "objective=lm"])
        else:
            words.append(word)
    other = {"task.max_length=3": "task.max_length=8", "steps=3": "steps=0"}
    other |= {"task.lm.max_length=3": "task.lm.max_length=8", "peft.name=bias": "peft.name=head"}
    other |= {"model.cuda_graphs=word": "model.cuda_graphs=false"}
    other |= {"model.dtype=float16": "model.dtype=float32", "micro_batch_size=3": "micro_batch_size=null"}
    other |= {"engine.name=vllm": "engine.name=none", "engine.python=word": "engine.python=null"}
    other |= {"distributed.shard=full": "distributed.shard=none"}
    other |= {f"{key}=word": f"{key}=true" for key in ("stop_on_divergence", "test_at_start")}
    words = [other.get(word, word) for word in words]
    common = [word for word in words if not word.startswith(("optimizer.", "checkpoint="))]
    kinds = {name: OPTIMIZERS.load(name) for name in OPTIMIZERS.built_in}
    for name, kind in kinds.items():  # each reads some of the optimizer's
        own = tuple(f"optimizer.{setting.name}=" for setting in kind.settings)
        read = [word for word in words if word.startswith(own)]
        read += ["objective.loss=cross_entropy"] if kind.needs_backward else []
        read += ["optimizer.noise=rademacher", "optimizer.samples=1"] if name == "mezo_adam" else []  # for its window
        build_config([*common, *read, f"optimizer.name={name}"])
    build_config(["checkpoint=trajectory"])
    assert {setting.name for kind in kinds.values() for setting in kind.settings} == {
        key.removeprefix("optimizer.") for key in plain if key.startswith("optimizer.") and key != "optimizer.name"
    }


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["peft.r=4"], "peft.r=4: peft=none has no such setting, only peft=lora"),
        (["peft=prefix", "peft.r=4"], "peft.r=4: peft=prefix has no such setting, only peft=lora"),
        (["peft=lora", "peft.length=4"], "only peft=prefix"),
        (["peft=head", "peft.layers=2"], "peft.layers=2: peft=head has no such setting, only peft=lora and peft=bias"),
        (["peft=lora", "peft.r=null"], "peft.r is not set: peft=lora needs it"),
        (["peft=lora", "peft.targets=all"], "not one of query_value, attention_feed_forward"),
        (["peft=lroa"], "(did you mean 'lora'?)"),
    ],
)
def test_a_setting_belongs_to_its_choice(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part)):
        build_config(words)
    assert build_config(["peft=lora"]).peft.r == 8
    assert build_config(["peft=bias"]).peft.layers is None
    assert build_config(["peft=bias", "peft.layers=2"]).peft.layers == 2


def test_local_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    made = build_config(["model.path=model", "data=files", "data.dir=rows"])
    assert made.model.path == str(tmp_path / "model")
    assert made.data.dir == str(tmp_path / "rows")
    assert build_config(["model.path=org/name"]).model.path == "org/name"
    (tmp_path / "demo").mkdir()
    assert build_config(["model=demo"]).model.path == "demo"


def test_a_program_that_uses_hydra_itself_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("a: 1\n")
    ConfigStore.instance().store(name="schema", node={"b": 2})
    with initialize_config_dir(config_dir=str(tmp_path), version_base="1.2"):
        theirs = GlobalHydra.instance().hydra
        build_config(["steps=3"])
        with pytest.raises(UserError):
            build_config(["steps=${nosuch}"])
        assert GlobalHydra.instance().hydra is theirs
        assert hydra.compose("theirs").a == 1
        assert hydra.compose("schema").b == 2


@pytest.mark.usefixtures("installed_loggers")
def test_several_loggers_are_chosen_by_a_list(tmp_path: Path) -> None:
    """Hydra merges the files of a list; the names of all of them are kept, and a key wins over a choice."""
    (tmp_path / "logger").mkdir()
    (tmp_path / "logger" / "team.yaml").write_text("names: [wandb, trackio]\nproject: team\n")
    (tmp_path / "logger" / "old.yaml").write_text("name: wandb\nproject: old\n")
    folder = str(tmp_path)
    for words, names, project in [
        (["logger=[tensorboard,wandb]"], ["tensorboard", "wandb"], "mezo"),
        (["logger=[team,tensorboard]"], ["wandb", "trackio", "tensorboard"], "team"),
        (["logger=[tensorboard,team]", "logger.names=[wandb]"], ["wandb"], "team"),
        (["logger=old"], ["wandb"], "old"),
        (["logger=[none,wandb]"], ["wandb"], "mezo"),
        ([], [], "mezo"),
    ]:
        logger = build_config([*words, "model=demo", "data=demo"], folder).logger
        assert (logger.names, logger.project) == (names, project)
    with pytest.raises(UserError, match=r"old\.yaml has no list 'names' of its own; choose it alone"):
        build_config(["logger=[tensorboard,old]"], folder)


@pytest.mark.usefixtures("installed_loggers")
def test_a_sweep_passes_several_loggers_on(tmp_path: Path) -> None:
    words = ["logger=[tensorboard,wandb]", "model=demo", "data=demo", "seed=1,2", f"hydra.sweep.dir={tmp_path}"]
    plan = plan_sweep(words)
    assert [job.config.logger.names for job in plan.jobs or ()] == [["tensorboard", "wandb"]] * 2
    assert "logger.names=['tensorboard','wandb']" in plan.overrides
