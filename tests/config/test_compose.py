"""Overrides and YAML files, also of a `--config-dir`, are composed into a validated config; mistakes are one line."""

import copy
import functools
import math
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from mezo_cli.adapters.settings import BiasConfig, LoraConfig
from mezo_cli.config import compose
from mezo_cli.config.choices import CONF, find_choices
from mezo_cli.config.compose import build_config
from mezo_cli.config.explain import key_owners, key_schema, readers, validate
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.schema import data_dir, to_dict
from mezo_cli.config.validation import build
from mezo_cli.errors import UserError
from mezo_cli.sweep.plan import plan_sweep
from tests import compositions
from tests.config.test_overrides import error_of

pytestmark = pytest.mark.usefixtures("composing_all")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["steps=5"], "steps", 5),
        (["++steps=5"], "steps", 5),
        (["steps=${seed}"], "steps", 42),
        (["optimizer.lr=1"], "optimizer.lr", 1.0),
        (["task.label_words=[Yes,No]"], "task.label_words", ["Yes", "No"]),
        (["task.labels=[0,1]"], "task.labels", ["0", "1"]),
        (["+task.rename.a=sentence"], "task.rename", {"a": "sentence"}),
        (["task=rte", "~task.rename.sentence1"], "task.rename", {"sentence2": "hypothesis"}),
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


BASE = to_dict(build_config(["data=demo"]))
NAMED = {"name": "mezo", "template": "x", "path": "x"}


@pytest.mark.parametrize(
    ("words", "steps", "batch", "lr"),
    [
        (["model=demo"], 60, 128, 2e-4),
        (["peft=lora", "model=demo"], 100, 32, 1e-2),
        (["model=demo", "steps=7", "optimizer.lr=1e-5"], 7, 128, 1e-5),
        (["model=demo", "forwards=10"], 5, 128, 2e-4),
        (["model=demo", "optimizer=es"], 100_000, 64, 5e-4),
        (["model=demo", "peft=bias"], 100_000, 64, 1e-6),
        (["model=demo", "experiment=paper/mezo"], 100_000, 64, 1e-6),
        (["model=bert-base"], 100_000, 64, 1e-6),
    ],
)
def test_an_embedded_model_has_what_suits_it_unless_given(words: list[str], steps: int, batch: int, lr: float) -> None:
    config = build_config(words)
    assert (config.steps, config.batch_size, config.optimizer.lr) == (steps, batch, lr)


@pytest.mark.parametrize(
    "key", [key for key in key_owners() if key_schema(key)["type"] in ("integer", "number") and "eval_at" not in key]
)
def test_every_number_has_a_range_that_is_kept(key: str) -> None:
    takes, (group, _, name) = key_schema(key), key.rpartition(".")
    low, above, high = (takes.get(bound) for bound in ("ge", "gt", "le"))
    assert low is not None or above is not None
    outside = [math.nan, math.inf, -math.inf]
    outside += [low - 1] if low is not None else [above]
    outside += [high * 2] if high is not None else []
    given = copy.deepcopy(BASE)
    node = functools.reduce(dict.__getitem__, group.split("."), given) if group else given
    if group in CHOICES:
        node["name"] = readers(group, name)[0]
        node.pop("loss", None)
    for value in outside:
        with pytest.raises(UserError, match=f"^{key}=.*out of range, allowed is"):
            build(given | {name: value} if node is given else node.update({name: value}) or given)
    kind = key_owners()[key]
    named = {key: value for key, value in NAMED.items() if key in kind.model_fields}
    for value in (low, high):
        if value is not None:
            assert getattr(validate(kind, {**named, name: value}), name) == value


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["objective=cls", "model.tie_embeddings=true"], "'model.tie_embeddings=true': objective=cls has no decoder"),
        (["model.stream_memory=1"], "'model.stream_memory=1': only model.stream=true reads it"),
        (["peft.r=4"], "'peft.r=4': peft=none does not read it, only peft=lora"),
        (["peft=head", "peft.layers=2"], "'peft.layers=2': peft=head does not read it, only peft=lora, peft=bias"),
        (["peft=lora", "peft.r=null"], "peft.r=null: allowed is a whole number at least 1"),
    ],
)
def test_a_setting_belongs_to_its_choice(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part)):
        build_config(words)
    assert build_config(["peft=lora"]).peft == LoraConfig(name="lora", r=8)
    assert build_config(["peft=bias", "peft.layers=2"]).peft == BiasConfig(name="bias", layers=2)


def test_local_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    made = build_config(["model.path=model", "data=files", "data.dir=rows"])
    assert made.model.path == str(tmp_path / "model")
    assert data_dir(made.data) == str(tmp_path / "rows")
    assert build_config(["model.path=org/name"]).model.path == "org/name"
    (tmp_path / "demo").mkdir()
    assert build_config(["model=demo"]).model.path == "demo"


def test_a_program_that_uses_hydra_itself_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("a: 1\n")
    ConfigStore.instance().store(name="schema", node={"b": 2})
    with initialize_config_dir(config_dir=str(tmp_path), version_base="1.3"):
        theirs = GlobalHydra.instance().hydra
        build_config(["steps=3"])
        with pytest.raises(UserError):
            build_config(["steps=${nosuch}"])
        assert GlobalHydra.instance().hydra is theirs
        assert hydra.compose("theirs").a == 1
        assert hydra.compose("schema").b == 2


@pytest.mark.usefixtures("installed_loggers")
def test_several_loggers_are_chosen_by_a_list(tmp_path: Path) -> None:
    (tmp_path / "logger").mkdir()
    (tmp_path / "logger" / "old.yaml").write_text("names: [wandb]\nproject: old\n")
    for words, names, project in [
        (["logger=[tensorboard,trackio]", "logger.names=[wandb]"], ["wandb"], "mezo"),
        (["logger=old"], ["wandb"], "old"),
    ]:
        logger = build_config([*words, "model=demo", "data=demo"], str(tmp_path)).logger
        assert (logger.names, logger.project) == (names, project)
    words = ["logger=[tensorboard,wandb]", "model=demo", "data=demo", "seed=1,2", f"hydra.sweep.dir={tmp_path}"]
    plan = plan_sweep(words)
    assert [job.config.logger.names for job in plan.jobs or ()] == [["tensorboard", "wandb"]] * 2
    assert all("logger.names=[tensorboard,wandb]" in job.overrides for job in plan.jobs)


COMPOSED = [
    [],
    ["model.path=x/y", "data=files", "data.dir=a", "hydra.run.dir=b c", "steps=6", "optimizer.lr=1e-2"],
    ["optimizer=mezo_adam", "optimizer.beta2=0.9", "seed=7", "data.seed=null", "optimizer.beta2=0.95", "steps=${seed}"],
    ["task=rte", "++task.rename.sentence1=b", "~task.rename.sentence2", "+task.rename.c=d", "task.hub={path: x}"],
    ["experiment=paper/mezo_lora", "task.label_words=[Yes,No]", "logger=[tensorboard,wandb]", "hydra.sweep.dir=s"],
    ["optimizer=es", "optimizer.anchor={l1: 1e-3}", "task.template='{sentence} costs \\${mask}, {mask}'"],
]


@pytest.mark.parametrize("words", COMPOSED)
def test_other_tests_compose_what_hydra_does(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = compositions.composing_once()
    with compose.hydra_session():
        overrides = [override.text for override in compose.parse(words, find_choices())]
        for folder in ("first", "second"):  # the second time from what is kept
            (tmp_path / folder).mkdir()
            monkeypatch.chdir(tmp_path / folder)
            ours, hydras = (function(overrides, None) for function in (once, compositions.whole))
            for node in (ours, hydras):
                node.hydra.overrides.hydra, node.hydra.job.override_dirname = [], ""  # the folders that are set
            assert OmegaConf.to_container(ours) == OmegaConf.to_container(hydras)


GLOBAL = "# @package _global_\n"
SHORT = ["model=demo", "data=demo", "steps=0"]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1"))
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config folder with a task, and with a space, a comma and a quote in its name."""
    folder = tmp_path / "my own, 'conf'"
    text = (CONF / "task" / "sst2.yaml").read_text()
    write(folder, "task/mine.yaml", text.replace("name: sst2", "name: mine", 1))
    return folder


def test_a_task_of_the_users_own(own: Path) -> None:
    assert build_config(["task=mine"], str(own)).task.name == "mine"
    assert "did you mean 'mine'" in error_of("task=mime", config_dir=own)
    assert "no such task" in error_of("task=mine")
    assert len(plan_sweep(["task=mine,rte"], str(own)).jobs or ()) == 2


def test_what_a_file_can_contain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_TEST_PROJECT", "mine")
    write(tmp_path, "task/base.yaml", "name: base\ntemplate: '{sentence} costs \\${mask} {mask}'\nlabels: [a, b]\n")
    write(tmp_path, "task/mine.yaml", "# My task.\n# @package _group_\ndefaults:\n  - base\n  - _self_\nname: mine\n")
    write(tmp_path, "experiment/sub/one.yaml", GLOBAL + "defaults:\n  - override /task: mine\nseed: 7\n")
    text = "defaults:\n  - sub/one\n  - override /model: demo\n  - _self_\n"
    text += "logger: {project: '${oc.env:MEZO_TEST_PROJECT}-${seed}'}\nhydra: {sweeper: {params: {seed: '1,2'}}}\n"
    write(tmp_path, "experiment/sub/two.yaml", GLOBAL + text)
    write(tmp_path, "experiment/broken.yaml", "steps: [\n")  # of no concern to a run that does not choose it
    write(tmp_path, "notes.yaml", "hydra: mine\n")
    config = build_config(["data=demo", "experiment=sub/two"], str(tmp_path))
    assert (config.task.name, config.model.name, config.logger.project) == ("mine", "demo", "mine-7")


def test_an_experiment_sets_and_the_command_line_wins(own: Path) -> None:
    text = "defaults:\n  - override /task: rte\n  - override /data: demo\nsteps: 7\nseed: 3\noptimizer:\n  lr: 0.5\n"
    write(own, "experiment/small.yaml", GLOBAL + text)
    made = build_config(["experiment=small"], str(own))
    assert (made.task.name, made.data.name, made.steps, made.optimizer.lr, made.data.seed) == ("rte", "demo", 7, 0.5, 3)
    for words in (["experiment=small", "task=sst2", "steps=9"], ["steps=9", "task=sst2", "experiment=small"]):
        made = build_config(words, str(own))
        assert (made.task.name, made.data.name, made.steps, made.optimizer.lr) == ("sst2", "demo", 9, 0.5)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("task/e.yaml", "name: a\nrename: [a]\n", "=[a]: expected pairs, e.g. 'task.rename={one: two}' ({}:2)"),
        ("task/e.yaml", "name: a\ncolumns: {a: b}\n", "task.columns={a: b}: expected a list, e.g. "),
        ("task/e.yaml", "- a\n- b\n", "task=[a, b]: expected a group of keys"),
        ("task/e.yaml", "name: a\ntemplate: caf\xe9\n", "'utf-8' codec can't decode"),
        ("task/e.yaml", "name: a\ntemplate: [", "{}:2: "),
        ("task/e.yaml", "name: a\nmax_length: 9\ntemplate: {text} It was {mask}.\n", "{}:3: expected <block end>"),
        ("task/e.yaml", "name: a\ntemplate: {text} was\n", "; quote it: template: '{text} was'"),
        ("task/e.yaml", "lm:\n  template: Title: {text}\n", "{}:2: mapping values are not allowed here; quote it: tem"),
        ("task/e.yaml", "name: a\ntemplate: {mask}\n", "{mask: null}: expected a text, so quote it ({}:2)"),
        ("task/e.yaml", "name: a\nlabels: [a, b\nmax_length: 9\n", "{}:2: "),
        ("task/e.yaml", "name: a\ntemplat: x\n", "unknown key 'task.templat' (did you mean 'task.template'?)"),
        ("task/e.yaml", "", "task.name is not set"),
        ("task/e.yaml", "name: a\ntemplate: x\nlabel_words: [Yes, No]\n", "boolean True: YAML reads Yes, No, on"),
        ("task/e.yaml", "name: a\ntemplate: ${nosuch}\n", "task.template: an interpolation does not resolve"),
        ("task/e.yaml", "name: ${steps\n", "name: no viable alternative at input '${steps'"),
        (
            "task/e.yaml",
            "defaults: [sst2]\nlabels: [a, b]\nhub: {labels: [x, y, z]}\n",
            "task.hub.labels has 3: give 2",
        ),
        ("experiment/e.yaml", "5\n", "Invalid loaded object type: int"),
        ("experiment/e.yaml", "steps: 7\n", "experiment"),
        ("experiment/e.yaml", GLOBAL + "task:\n  labels: []\n", "({}:3)"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - override /task: sst22\n", "'task/sst22'"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(name: str, text: str, line: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, text)
    said = error_of("task=e" if name.startswith("task") else "experiment=e", *SHORT, config_dir=tmp_path)
    assert line.replace("{}", str(path)) in said


def test_a_folder_that_cannot_be_used(own: Path, tmp_path: Path) -> None:
    write(own, "task/rte.yaml", "name: rte\n")
    assert "task=rte is already defined" in error_of("task=mine", config_dir=own)
    assert "no such folder" in error_of("steps=1", config_dir=tmp_path / "none")
    write(tmp_path / "main", "config.yaml", "steps: 77\n")
    assert "mezo has a config.yaml of its own and does not read" in error_of(*SHORT, config_dir=tmp_path / "main")


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("hydra/launcher=joblib", "pip install hydra-joblib-launcher"),
        ("hydra/launcher=jobib", "(did you mean 'joblib'?)"),
        ("hydra/launcher@x=basic", "allowed is hydra/launcher="),
        ("hydra.sweeper.params={seed:1}", "KEY=VALUE,VALUE"),
        ("hydra/sweeper=optuna", "a sweep is a grid"),
        ("hydra.searchpath=[x]", "--config-dir DIR"),
    ],
)
def test_launchers_and_sweepers_are_chosen_by_name(word: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezo_cli.config.overrides.is_installed", lambda package: False)
    with pytest.raises(UserError) as caught:
        plan_sweep([*SHORT, word])
    assert part in " ".join(str(caught.value).split())


def test_a_launcher_is_for_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="add -m"):
        compose.load([*SHORT, "hydra/launcher=basic"])
    plan = plan_sweep([*SHORT, "hydra/launcher=basic", "seed=1,2", f"hydra.sweep.dir={tmp_path}"])
    assert (plan.launcher, len(plan.jobs)) == ("basic", 2)
