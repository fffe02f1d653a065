"""Overrides and YAML files to a checked config: what holds comes through, what does not is one clear line."""

import dataclasses
import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli import checks, config, overrides
from mezo_cli.errors import UserError
from mezo_cli.schema import METHODS, Config


def told(*words: str, multirun: bool = False, config_dir: Path | None = None) -> str:
    """The line that refuses the overrides."""
    with pytest.raises(UserError) as error:
        config.check(words, None if config_dir is None else str(config_dir), multirun)
    line = str(error.value)
    assert "\n" not in line
    return line


def test_the_defaults_are_the_papers() -> None:
    made = config.build([])
    assert (made.task.name, made.objective.name, made.optimizer.name) == ("sst2", "mlm", "mezo")
    assert (made.model.name, made.model.dtype, made.peft.name) == ("roberta-large", "float32", "none")
    assert (made.data.name, made.data.shots, made.data.seed) == ("hub", None, 42)
    assert (made.optimizer.lr, made.optimizer.eps, made.optimizer.weight_decay) == (1e-6, 1e-3, 0.0)
    assert (made.optimizer.noise, made.optimizer.schedule, made.optimizer.samples) == ("gaussian", "constant", 1)
    assert (made.seed, made.steps, made.batch_size) == (42, 100_000, 64)
    assert (made.eval_every, made.log_every, made.checkpoint) == (10_000, 10, "full")


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("nosuch=1", ["unknown key 'nosuch'", "known: task, objective"]),
        ("stepps=1", ["(did you mean 'steps'?)"]),
        ("+stepps=1", ["(did you mean 'steps'?)"]),
        ("++stepps=1", ["(did you mean 'steps'?)"]),
        ("~stepps", ["(did you mean 'steps'?)"]),
        ("lr=1e-3", ["unknown key 'lr'", "(did you mean 'optimizer.lr'?)"]),
        ("eps=1e-3", ["(did you mean 'optimizer.eps'?)"]),
        ("optimizer.ep=1", ["'optimizer.ep'", "(did you mean 'optimizer.eps'?)", "known under optimizer"]),
        ("+optimizer.ep=1", ["(did you mean 'optimizer.eps'?)"]),
        ("++optimizer.ep=1", ["(did you mean 'optimizer.eps'?)"]),
        ("task.hub.pth=1", ["(did you mean 'task.hub.path'?)"]),
        ("steps.more=1", ["'steps.more'", "steps has no keys of its own"]),
        ("task.labels.0=x", ["task.labels=[one,two]"]),
        ("task=sst3", ["task=sst3: no such task", "(did you mean 'sst5'?)", "allowed: cola, cr, mnli"]),
        ("+task=rte", ["task is there already; write task=..."]),
        ("++task=rte", ["task is there already; write task=..."]),
        ("~task", ["cannot be removed"]),
        ("task=", ["no such task", "allowed: cola"]),
        ("task=null", ["no such task"]),
        ("task=[sst2,rte]", ["one choice is wanted"]),
        ("task@there=sst2", ["write task=..."]),
        ("objective=mml", ["(did you mean 'mlm'?)"]),
        ("model=robert-large", ["(did you mean 'roberta-large'?)"]),
        ("optimizer=adm", ["(did you mean 'adamw'?); allowed: adamw, "]),
        ("objective.name=mml", ["not one of mlm, cls, lm"]),
        ("optimizer.name=adm", ["not one of mezo", "(did you mean 'adamw'?)"]),
        ("logger.name=wand", ["(did you mean 'wandb'?)"]),
        ("objective.loss=acuracy", ["not one of cross_entropy, accuracy, f1", "(did you mean 'accuracy'?)"]),
        ("optimizer.noise=gausian", ["(did you mean 'gaussian'?)"]),
        ("checkpoint=ful", ["(did you mean 'full'?)"]),
        ("experiment=nosuch", ["experiment=nosuch: no such experiment"]),
        ("+experiment=nosuch", ["write experiment=..."]),
        ("steps=ten", ["steps=ten: allowed is a whole number at least 0"]),
        ("steps=1.5", ["steps=1.5: allowed is a whole number"]),
        ("steps=1e3", ["steps=1000.0: allowed is a whole number"]),
        ("steps=true", ["steps=True: allowed is a whole number"]),
        ("steps=null", ["steps=null: allowed is a whole number"]),
        ("steps=", ["steps=: allowed is a whole number"]),
        ("steps=[1]", ["steps=[1]: allowed is a whole number"]),
        ("steps={a:1}", ["allowed is a whole number"]),
        ("steps=-1", ["out of range", "at least 0"]),
        ("steps=nan", ["out of range"]),
        ("steps=99999999999", ["out of range", "at most 4294967295"]),
        ("optimizer.lr=fast", ["optimizer.lr=fast: allowed is a finite number"]),
        ("optimizer.lr=", ["allowed is a finite number"]),
        ("optimizer.lr=true", ["allowed is a finite number"]),
        ("optimizer.lr=nan", ["out of range"]),
        ("optimizer.lr=inf", ["out of range"]),
        ("optimizer.lr=-inf", ["out of range"]),
        ("optimizer.lr='nan'", ["out of range"]),
        ("optimizer.eps=0", ["out of range, allowed is a finite number above 0"]),
        ("seed=-1", ["out of range"]),
        ("seed=4294967296", ["at most 4294967295"]),
        ("model.path=", ["model.path is empty"]),
        ("model.path=null", ["model.path holds null"]),
        ("model.revision=1e10", ["quote it"]),
        ("data.dir=", ["data.dir is empty"]),
        ("task.label_words=great", ["a list is wanted"]),
        ("task.label_words={a:b}", ["a list is wanted"]),
        ("task.label_words=[Yes,true]", ["boolean True", "quote the word"]),
        ("task.labels=[a,[b]]", ["a text is wanted"]),
        ("task.hub=null", ["a group of keys is wanted"]),
        ("task.rename=[a]", ["+task.rename.NAME=VALUE"]),
        ("task.rename.a=b", ["+task.rename.a=b"]),
        ("+steps=5", ["steps is there already; write steps=..."]),
        ("~steps", ["cannot be removed"]),
        ("task", ["'task' is not KEY=VALUE"]),
        ("=5", ["is not KEY=VALUE"]),
        ("steps 5", ["is not KEY=VALUE"]),
        ("--steps=5", ["cannot be read"]),
        ("steps==5", ["cannot be read", "quote"]),
        ("task.template={sentence} It was {mask}.", ["cannot be read", "quote"]),
        ("steps=1,2", ["names several values: add -m"]),
        ("task=sst2,rte", ["names several values: add -m"]),
        ("seed=range(1,3)", ["add -m"]),
        ("seed=choice(1,2)", ["add -m"]),
        ("task=glob(s*)", ["add -m"]),
        ("steps=${nosuch}", ["steps: an interpolation does not resolve", "'nosuch'"]),
        ("steps=${sed}", ["(did you mean 'seed'?)"]),
        ("model.path=${oc.env:MEZO_NOT_SET}", ["model.path: an interpolation does not resolve", "MEZO_NOT_SET"]),
        ("hydra.run.dir=", ["hydra.run.dir needs a folder"]),
        ("hydra.run.dir='~/runs'", ["$HOME"]),
        ("hydra.run.dir=null", ["hydra.run.dir needs a folder"]),
        ("hydra.run.dir=${nosuch}", ["hydra.run.dir: an interpolation does not resolve"]),
        ("hydra.run.dri=x", ["(did you mean 'hydra.run.dir'?)"]),
        ("hydra.job.chdir=true", ["only hydra.run.dir, hydra.sweep.dir, hydra.sweep.subdir"]),
        ("hydra/launcher=joblib", ["only hydra.run.dir"]),
        ("+hydra.x=1", ["only hydra.run.dir"]),
    ],
)
def test_what_does_not_hold_is_one_line(word: str, parts: list[str]) -> None:
    line = told(word)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("task=sst2,nosuch", ["task=nosuch: no such task"]),
        ("steps=1,ten", ["steps=ten: allowed is a whole number"]),
        ("optimizer.lr=1e-3,nan", ["out of range"]),
        ("seed=range(3,1)", ["names no value"]),
        ("task=glob(x*)", ["names no value"]),
        ("seed=glob(*)", ["names no value"]),
    ],
)
def test_a_sweep_is_checked_whole(word: str, parts: list[str]) -> None:
    line = told("batch_size=8", word, "seed=1,2" if "seed" not in word else "steps=1", multirun=True)
    for part in parts:
        assert part in line


def test_a_sweep_counts_its_jobs() -> None:
    assert config.check(["task=sst2,rte", "seed=13,42,87", "steps=1"], multirun=True) == 6
    assert config.check(["task=glob(sst*)"], multirun=True) == 2
    assert config.check(["seed=range(0,4)"], multirun=True) == 4
    assert config.check(["steps=1"], multirun=True) == 1


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
def test_what_holds_comes_through(words: list[str], key: str, value: Any) -> None:
    made: Any = config.build(words)
    for part in key.split("."):
        made = getattr(made, part)
    assert made == value
    assert type(made) is type(value)


def numbers(kind: Any = Config, prefix: str = "") -> list[tuple[str, Any, dict[str, Any]]]:
    """Every number of the schema: key, type, limits."""
    found = []
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        inner = checks.plain_type(hints[item.name])
        if dataclasses.is_dataclass(inner):
            found += numbers(inner, f"{prefix}{item.name}.")
        elif inner in (int, float):
            found.append((f"{prefix}{item.name}", inner, dict(item.metadata)))
    return found


@pytest.mark.parametrize(("key", "kind", "limits"), numbers())
def test_every_number_has_a_range_that_is_kept(key: str, kind: Any, limits: dict[str, Any]) -> None:
    low, above, high = limits["low"], limits["above"], limits["high"]
    assert low is not None or above is not None
    outside = [math.nan, math.inf, -math.inf]
    outside += [low - 1] if low is not None else [above]
    outside += [high * 2] if high is not None else []
    for value in outside:
        *groups, name = key.split(".")
        plain: Any = {name: value}
        for group in reversed(groups):
            plain = {group: plain}
        defaults = config._defaults(Config)
        with pytest.raises(UserError, match=f"^{key}=.*out of range, allowed is"):
            checks.build(merged(defaults, plain))
    for value in (low, high):
        if value is not None:
            checks._number(key, kind(value), kind, limits)


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


def test_every_key_can_be_overridden() -> None:
    """A key that the schema has but Hydra's nodes lack would be refused as unknown."""
    plain = {key for key in checks.all_keys() if checks.container(key) is None}
    samples = {"int": "3", "float": "0.5"}
    kinds = {key: kind.__name__ for key, kind, _ in numbers()}
    words = []
    for key in sorted(plain):
        choice: Any = Config
        for part in key.split("."):
            item = next(f for f in dataclasses.fields(choice) if f.name == part)
            choice = checks.plain_type(typing.get_type_hints(choice)[part])
        allowed, owner = item.metadata.get("choices"), item.metadata.get("of")
        word = f"{key}={allowed[-1] if allowed else samples.get(kinds.get(key, ''), 'word')}"
        if owner:
            config.build([f"{key.split('.')[0]}={owner}", word])
        else:
            words.append(word)
    other = {"task.max_length=3": "task.max_length=8", "steps=3": "steps=0"}
    other |= {"task.lm.max_length=3": "task.lm.max_length=8", "peft.name=bias": "peft.name=head"}
    words = [other.get(word, word) for word in words]
    common = [word for word in words if not word.startswith(("optimizer.", "checkpoint="))]
    for name, method in METHODS.items():  # each reads some of the optimizer's
        keys = tuple(f"optimizer.{key}=" for key in method.reads)
        read = [word for word in words if word.startswith(keys)]
        read += ["objective.loss=cross_entropy"] if method.backward else []
        read += ["optimizer.noise=rademacher", "optimizer.samples=1"] if name == "mezo_adam" else []  # for its window
        config.build([*common, *read, f"optimizer.name={name}"])
    config.build(["checkpoint=trajectory"])
    assert {key for method in METHODS.values() for key in method.reads} == {
        key.removeprefix("optimizer.") for key in plain if key.startswith("optimizer.") and key != "optimizer.name"
    }


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["peft.r=4"], "peft.r=4: peft=none has no such setting, only peft=lora"),
        (["peft=prefix", "peft.r=4"], "peft.r=4: peft=prefix has no such setting, only peft=lora"),
        (["peft=lora", "peft.length=4"], "only peft=prefix"),
        (["peft=lora", "peft.r=null"], "peft.r is not set: peft=lora needs it"),
        (["peft=lora", "peft.targets=all"], "not one of query_value, attention_feed_forward"),
        (["peft=lroa"], "(did you mean 'lora'?)"),
    ],
)
def test_a_setting_belongs_to_its_choice(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part)):
        config.build(words)
    assert config.build(["peft=lora"]).peft.r == 8


# --- YAML of the user's own ---


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config folder with a space, a comma and a quote in its name."""
    folder = tmp_path / "my own, 'conf'"
    (folder / "task").mkdir(parents=True)
    (folder / "experiment").mkdir()
    text = (config.conf_dir() / "task" / "sst2.yaml").read_text()
    (folder / "task" / "mine.yaml").write_text(text.replace("name: sst2", "name: mine", 1))
    return folder


def test_a_task_of_the_users_own(own: Path) -> None:
    assert config.build(["task=mine"], str(own)).task.name == "mine"
    assert "did you mean 'mine'" in told("task=mime", config_dir=own)
    assert "no such task" in told("task=mine")
    assert config.check(["task=mine,rte"], str(own), multirun=True) == 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name: bad\ntemplate: [", ["task/bad.yaml:", "not YAML"]),
        ("name: bad\n\ttemplate: x", ["task/bad.yaml:2", "not YAML"]),
        ("name: bad\ntemplate: x\ntempalte: y\n", ["'task.tempalte'", "did you mean 'task.template'", "bad.yaml:3"]),
        ("name: bad\n", ["task.template is not set"]),
        ("name: bad\ntemplate: x\nlabel_words: [Yes, No]\n", ["boolean True", "quote the word", "bad.yaml:3"]),
        ("name: bad\ntemplate: x\nlabels: {a: b}\n", ["task/bad", "a mapping stands where a list is wanted"]),
        ("name: bad\ntemplate: x\nmax_length: long\n", ["task.max_length=long", "whole number", "bad.yaml:3"]),
        ("name: bad\ntemplate: x\nmax_length: .nan\n", ["out of range", "bad.yaml:3"]),
        ("name: bad\ntemplate: ${nosuch}\n", ["task.template", "does not resolve", "bad.yaml:2"]),
        ("- a\n- b\n", ["bad"]),
        ("just words\n", ["task.just words"]),
        ("", ["task.name is not set"]),
        ("name: bad\ntemplate: x\nhub: hello\n", ["task.hub"]),
        ("defaults: [nosuch]\nname: bad\n", ["nosuch"]),
        ("# @package _global_\nstepps: 1\n", ["stepps"]),
    ],
)
def test_a_bad_task_file_is_one_line(own: Path, text: str, parts: list[str]) -> None:
    (own / "task" / "bad.yaml").write_text(text)
    line = told("task=bad", config_dir=own)
    for part in parts:
        assert part in line


def test_bytes_that_are_no_text(own: Path) -> None:
    (own / "task" / "bad.yaml").write_bytes(b"name: \xff\xfe\n")
    told("task=bad", config_dir=own)


def test_a_built_in_name_is_not_taken_silently(own: Path) -> None:
    (own / "task" / "rte.yaml").write_text("name: rte\n")
    assert "task=rte is built in already" in told("task=mine", config_dir=own)


def test_a_config_folder_that_is_none(tmp_path: Path) -> None:
    assert "no such folder" in told("steps=1", config_dir=tmp_path / "none")


def test_an_experiment_sets_and_the_command_line_wins(own: Path) -> None:
    (own / "experiment" / "small.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /task: rte\n  - override /data: demo\n"
        "steps: 7\nseed: 3\noptimizer:\n  lr: 0.5\n"
    )
    made = config.build(["experiment=small"], str(own))
    assert (made.task.name, made.data.name, made.steps, made.optimizer.lr) == ("rte", "demo", 7, 0.5)
    assert made.data.seed == 3
    for words in (["experiment=small", "task=sst2", "steps=9"], ["steps=9", "task=sst2", "experiment=small"]):
        made = config.build(words, str(own))
        assert (made.task.name, made.data.name, made.steps, made.optimizer.lr) == ("sst2", "demo", 9, 0.5)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("# @package _global_\nstepps: 7\n", ["'stepps'", "did you mean 'steps'", "bad.yaml:2"]),
        ("# @package _global_\noptimizer:\n  lr: fast\n", ["optimizer.lr=fast", "bad.yaml:3"]),
        ("# @package _global_\ndefaults:\n  - override /task: nosuch\n", ["nosuch"]),
        ("# @package _global_\ndefaults:\n  - override /tusk: rte\n", ["tusk"]),
        ("steps: 7\n", ["experiment"]),
        ("{", ["bad.yaml:"]),
    ],
)
def test_a_bad_experiment_is_one_line(own: Path, text: str, parts: list[str]) -> None:
    (own / "experiment" / "bad.yaml").write_text(text)
    line = told("experiment=bad", config_dir=own)
    for part in parts:
        assert part in line


# --- the run's own config.yaml, and quoting ---

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
odd = st.sampled_from(["Yes", "no", "null", "~", "1e3", "0x10", "1_000", "on", "${seed}", "a: b", "- a", "'", '"', "#"])


@settings(max_examples=60, deadline=None)
@given(st.one_of(words, odd), st.lists(st.one_of(words, odd), min_size=1, max_size=3))
def test_config_yaml_reads_back_as_it_was(tmp_path_factory: Any, text: str, several: list[str]) -> None:
    base = config.build([])
    task = dataclasses.replace(base.task, name=text, label_words=several, rename={several[0]: text})
    path = tmp_path_factory.mktemp("c") / "config.yaml"
    wanted = dataclasses.replace(base, task=task, model=dataclasses.replace(base.model, path=text))
    path.write_text(config.to_yaml(wanted), encoding="utf-8")
    assert config.read(path) == wanted


@settings(max_examples=25, deadline=None)
@given(st.one_of(words, odd))
def test_a_quoted_value_reaches_the_config_as_it_was(text: str) -> None:
    assert config.build([f"logger.project={overrides.quoted(text)}"]).logger.project == text


def test_a_damaged_config_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in ("steps: [", "- a", "steps: ten", "nosuch: 1", "", "\x00"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml"):
            config.read(path)
    with pytest.raises(UserError, match="no such file"):
        config.read(tmp_path / "none.yaml")


def test_local_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    made = config.build(["model.path=model", "data=files", "data.dir=rows"])
    assert made.model.path == str(tmp_path / "model")
    assert made.data.dir == str(tmp_path / "rows")
    assert config.build(["model.path=org/name"]).model.path == "org/name"
    (tmp_path / "demo").mkdir()
    assert config.build(["model=demo"]).model.path == "demo"


def test_a_program_that_uses_hydra_itself_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("a: 1\n")
    ConfigStore.instance().store(name="schema", node={"b": 2})
    with initialize_config_dir(config_dir=str(tmp_path), version_base="1.2"):
        theirs = GlobalHydra.instance()
        config.build(["steps=3"])
        with pytest.raises(UserError):
            config.build(["steps=${nosuch}"])
        assert GlobalHydra.instance() is theirs
        assert compose("theirs").a == 1
        assert compose("schema").b == 2
