"""Config files of a `--config-dir`: what they may contain, and mistakes in them are one line with file and line."""

from pathlib import Path

import pytest

from mezo_cli.config import compose
from mezo_cli.config.choices import CONF
from mezo_cli.config.compose import build_config
from mezo_cli.errors import UserError
from mezo_cli.sweep.plan import plan_sweep
from tests.config.refused import error_of

pytestmark = pytest.mark.usefixtures("composing_all")

GLOBAL = "# @package _global_\n"
SHORT = ["model=demo", "data=demo", "steps=0"]


def write(folder: Path, name: str, text: str) -> Path:
    """Write a file into a config folder."""
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
