"""Config files of a `--config-dir`: what they may contain, and mistakes in them are one line with file and line."""

from pathlib import Path

import pytest
import yaml

from mezo_cli.config import compose
from mezo_cli.errors import UserError
from mezo_cli.sweep.plan import plan_sweep
from tests.command_line import error_line, mezo

pytestmark = pytest.mark.usefixtures("composing_all")

GLOBAL = "# @package _global_\n"
SHORT = ["model=demo", "data=demo", "steps=0"]


def write(folder: Path, name: str, text: str) -> Path:
    """Write a file into a config folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1"))
    return path


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
    config = compose.build_config(["data=demo", "experiment=sub/two"], str(tmp_path))
    assert (config.task.name, config.model.name, config.logger.project) == ("mine", "demo", "mine-7")


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "task/e.yaml",
            "name: a\nrename: [a]\n",
            "task.rename=[a]: expected pairs, e.g. task.rename={one: two} ({}:2)",
        ),
        ("task/e.yaml", "name: a\ncolumns: {a: b}\n", "task.columns={a: b}: expected a list, e.g. "),
        ("task/e.yaml", "- a\n- b\n", "task=[a, b]: expected a group of keys"),
        ("task/e.yaml", "name: a\nlm: [a]\n", "task.lm=[a]: expected a group of keys ({}:2)"),
        ("task/e.yaml", "name: a\ntemplate: caf\xe9\n", "{}:2: the file is not UTF-8; save it as UTF-8"),
        ("task/e.yaml", "name: [\n", "{}:2: not YAML"),
        ("task/e.yaml", "name: a\ntemplat: x\n", "unknown key 'task.templat' (did you mean 'task.template'?)"),
        ("experiment/e.yaml", "5\n", "{}: expected a mapping"),
        ("experiment/e.yaml", GLOBAL + "task:\n  labels: []\n", "give two or more names"),
        ("experiment/e.yaml", GLOBAL + "task:\n  labels: []\n", "({}:3)"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - override /task: sst22\n", "'task/sst22'"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - override /tusk: sst2\n", "tusk"),
        ("experiment/e.yaml", GLOBAL + "defaults: sst2\n", "defaults"),
        ("experiment/e.yaml", GLOBAL + "seed: ${sed}\n", "seed: an interpolation does not resolve"),
        (
            "task/e.yaml",
            "defaults: [sst2]\nlabels: [a, b]\nhub: {labels: [x, y, z]}\n",
            "labels has 3 names for 2",
        ),
        ("task/e.yaml", "name: ${steps\n", "name: no viable alternative at input '${steps'"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(name: str, text: str, line: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, text)
    chosen = "task=e" if name.startswith("task") else "experiment=e"
    said = error_line(mezo("train", "--cfg", "job", "--config-dir", tmp_path, chosen, *SHORT))
    assert line.replace("{}", str(path)) in said


def test_a_grid_cannot_set_keys_of_hydra(tmp_path: Path) -> None:
    for key in ("hydra.run.dir", "hydra/launcher"):
        text = yaml.safe_dump({"hydra": {"sweeper": {"params": {key: "basic"}}}})
        write(tmp_path, "experiment/e.yaml", GLOBAL + text)
        with pytest.raises(UserError, match="cannot be swept over"):
            plan_sweep(["experiment=e", *SHORT], str(tmp_path))


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("hydra/launcher=joblib", "pip install hydra-joblib-launcher"),
        ("hydra/launcher=jobib", "(did you mean 'joblib'?)"),
        ("hydra/launcher=basic,joblib", "with one of basic, joblib, submitit_local, submitit_slurm, ray"),
        ("hydra/launcher@x=basic", "allowed is hydra/launcher="),
        ("+hydra/callbacks=x", "can be set"),
        ("hydra.launcher._target_=os.getcwd", "_target_"),
        ("hydra.launcher.n_jobs=2", "n_jobs"),
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


def test_a_config_yaml_that_would_not_be_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.yaml", "steps: 77\n")
    with pytest.raises(UserError, match=r"mezo has a config\.yaml of its own and does not read this one"):
        compose.build_config(SHORT, str(tmp_path))


def test_a_folder_with_an_interpolation_in_its_name(tmp_path: Path) -> None:
    write(tmp_path / "a${b}c", "task/mine.yaml", "defaults:\n  - sst2\nname: mine\n")
    with pytest.raises(UserError, match=r"a\$\{b\}c contains '\$\{'; rename the folder"):
        compose.build_config([*SHORT, "task=mine"], str(tmp_path / "a${b}c"))
