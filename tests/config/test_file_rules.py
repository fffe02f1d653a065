"""A config file of the user's cannot run code, and what it may contain is checked before Hydra composes it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezo_cli.config import compose
from mezo_cli.config.sweep_plan import plan_sweep
from mezo_cli.errors import UserError
from tests.command_line import error_line, mezo

pytestmark = pytest.mark.usefixtures("composing_all")

GLOBAL = "# @package _global_\n"
SHORT = ["model=demo", "data=demo", "steps=0"]


def write(folder: Path, name: str, text: str) -> Path:
    """Write a file into a config folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(folder: Path, *words: str) -> str:
    """Return the line with which an experiment `e` of a folder is refused."""
    return error_line(mezo("train", "--config-dir", folder, "experiment=e", *SHORT, *words))


class Touch:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def hydra_settings(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return settings of Hydra's own that run code or reach the machine, as a file would give them."""
    made = str(tmp_path / "made")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Touch(tmp_path / "made")))
    load = {"_target_": "numpy.load", "file": str(tmp_path / "evil.pkl"), "allow_pickle": True}
    handler = {"class": "logging.FileHandler", "filename": made}
    return {
        "pickle": {"callbacks": {"x": load}},
        "makedirs": {"callbacks": {"x": {"_target_": "os.makedirs", "name": made}}},
        "subprocess": {"callbacks": {"x": {"_target_": "subprocess.Popen", "args": ["touch", made]}}},
        "log file": {"job_logging": {"version": 1, "handlers": {"f": handler}, "root": {"handlers": ["f"]}}},
        "hydra's log file": {"hydra_logging": {"version": 1, "handlers": {"f": handler}}},
        "environment": {"job": {"env_set": {"PATH": made}}},
        "working directory": {"job": {"chdir": True}},
        "output": {"output_subdir": made},
        "run directory": {"run": {"dir": made}},
        "sweep directory": {"sweep": {"dir": made}},
        "search path": {"searchpath": [f"file://{made}"]},
        "setup": {"launcher": {"setup": [f"touch {made}"]}},
        "launcher": {"launcher": {"_target_": "os.makedirs", "name": made}},
        "sweeper": {"sweeper": {"_target_": "os.makedirs", "name": made}},
        "grid's code": {"sweeper": {"params": {"_target_": "os.getcwd"}}},
    }


def test_settings_of_hydra_in_a_file_are_refused_and_touch_nothing(tmp_path: Path) -> None:
    for name, settings in hydra_settings(tmp_path).items():
        path = write(tmp_path / "c", "experiment/e.yaml", GLOBAL + yaml.safe_dump({"hydra": settings}))
        line = refused(tmp_path / "c", *(["-m"] if name == "pickle" else []))
        assert str(path) in line, name
        assert "hydra.sweeper.params" in line or "_target_" in line, name
    assert sorted(one.name for one in tmp_path.iterdir()) == ["c", "evil.pkl"]


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        (
            "task/e.yaml",
            "# @package hydra.callbacks.x\n_target_: os.getcwd\n",
            "e.yaml:1: '@package hydra.callbacks.x'",
        ),
        ("task/hydra.yaml", "# @package _name_\ncallbacks: {}\n", "'@package _name_'"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - override /hydra/launcher: joblib\n", "on the command line"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - /hydra/callbacks: x\n", "on the command line"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - task@hydra.callbacks.x: sst2\n", "allowed are the groups"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - override /task@hydra: sst2\n", "allowed are the groups"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - /task/../../evil\n", "allowed are the groups"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - override /task: ../../evil\n", "no such task"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - override /task: ${logger.project}\n", "no such task"),
        ("experiment/e.yaml", GLOBAL + "defaults:\n  - override /logger: [wandb, trackio]\n", "no such logger"),
        ("experiment/e.yaml", GLOBAL + "hydra: {run: {dir: x}, when: 2001-99-99}\n", "hydra.run"),
        ("experiment/e.yaml", GLOBAL + "optimizer:\n  _target_: os.getcwd\n", "e.yaml:3: optimizer._target_"),
        ("task/e.yaml", "rename: {a: {_target_: os.getcwd}}\n", "cannot name code"),
        ("task/e.yaml", "labels: [{_target_: os.getcwd}]\n", "cannot name code"),
        ("logger/e.yaml", "name: none\nproject: ${oc.env:HOME}\n", "e.yaml:2: project: a config file cannot call"),
        ("logger/e.yaml", "project: ${oc.${peft.name}:HOME}\n", "cannot call"),
        ("logger/e.yaml", "project: ${oc.decode:'\\${oc.env:HOME}'}\n", "cannot call"),
        ("experiment/e.yaml", GLOBAL + "hydra: {sweeper: {params: {seed: '\\${oc.env:A}'}}}\n", "cannot call"),
        ("hydra/launcher/basic.yaml", "_target_: os.getcwd\n", "cannot contain settings of Hydra's own"),
        ("config.yaml", "steps: 77\n", "mezo has a config.yaml of its own and does not read this one"),
    ],
)
def test_what_a_file_cannot_contain(name: str, text: str, part: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(UserError) as caught:
        compose.build_config(SHORT, str(tmp_path))  # the file is not even chosen
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_what_a_file_can_contain(tmp_path: Path) -> None:
    write(tmp_path, "task/base.yaml", "name: base\ntemplate: '{sentence} costs \\${mask} {mask}'\nlabels: [a, b]\n")
    write(tmp_path, "task/mine.yaml", "# My task.\n# @package _group_\ndefaults:\n  - base\n  - _self_\nname: mine\n")
    write(tmp_path, "experiment/sub/one.yaml", GLOBAL + "defaults:\n  - override /task: mine\nseed: 7\n")
    text = "defaults:\n  - sub/one\n  - override /model: demo\n  - _self_\nlogger: {project: '${task.name}-${seed}'}\n"
    write(tmp_path, "experiment/sub/two.yaml", GLOBAL + text + "hydra: {sweeper: {params: {seed: '1,2'}}}\n")
    write(tmp_path, "experiment/broken.yaml", "steps: [\n")  # of no concern to a run that does not choose it
    write(tmp_path, "notes.yaml", "hydra: mine\n")
    config = compose.build_config(["data=demo", "experiment=sub/two"], str(tmp_path))
    assert (config.task.name, config.model.name, config.logger.project) == ("mine", "demo", "mine-7")
    with pytest.raises(UserError, match=r"broken\.yaml:2: not YAML"):
        compose.build_config(["experiment=broken"], str(tmp_path))


def test_a_grid_cannot_set_keys_of_hydra(tmp_path: Path) -> None:
    for key in ("hydra.launcher.setup", "++hydra.callbacks.x._target_", "hydra.run.dir", "hydra/launcher"):
        write(
            tmp_path, "experiment/e.yaml", GLOBAL + yaml.safe_dump({"hydra": {"sweeper": {"params": {key: "basic"}}}})
        )
        line = error_line(mezo("train", "-m", "--config-dir", tmp_path, "experiment=e", *SHORT))
        assert "hydra" in line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: a\nrename: [a]\n", "e.yaml:2: task.rename: expected a mapping, e.g. {one: two}, not a list"),
        ("name: a\ncolumns: {a: b}\n", "e.yaml:2: task.columns: expected a list, e.g. [one, two], not a mapping"),
        ("- a\n- b\n", "e.yaml: expected a mapping of keys to values, not a list"),
        ("lm: [a]\n", "e.yaml:1: task.lm: expected a mapping of keys to values, not a list"),
        ("name: a\ntemplate: caf\xe9\n", "e.yaml:2: the file is not UTF-8; save it as UTF-8"),
    ],
)
def test_a_file_that_hydra_cannot_merge_is_named(text: str, line: str, tmp_path: Path) -> None:
    path = write(tmp_path, "task/e.yaml", "")
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        compose.build_config(["task=e", *SHORT], str(tmp_path))
    assert str(caught.value) == f"{tmp_path / 'task'}/{line}"


def test_the_environment_is_read_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_TEST_PROJECT", "mine")
    assert compose.build_config([*SHORT, "logger.project=${oc.env:MEZO_TEST_PROJECT}"]).logger.project == "mine"


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("hydra/launcher=joblib", "pip install hydra-joblib-launcher"),
        ("hydra/launcher=jobib", "(did you mean 'joblib'?)"),
        ("hydra/launcher=basic,joblib", "with one of basic, joblib, submitit_local, submitit_slurm, ray"),
        ("hydra/launcher@x=basic", "allowed is hydra/launcher="),
        ("+hydra/callbacks=x", "can be set"),
        ("hydra.launcher._target_=os.getcwd", "_target_"),
        ("+hydra.launcher.x={_target_:os.getcwd}", "_target_"),
        ("hydra.launcher.n_jobs=2", "n_jobs"),
        ("hydra.sweeper.params={seed:1}", "KEY=VALUE,VALUE"),
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
        compose.compose_run([*SHORT, "hydra/launcher=basic"])
    words = ["hydra/launcher=basic", "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2", "seed=1,2"]
    plan = plan_sweep([*SHORT, *words, f"hydra.sweep.dir={tmp_path}"])
    assert (plan.sweeper.name, plan.sweeper.launcher, len(plan.jobs or [])) == ("basic", "basic", 2)


def test_a_folder_with_an_interpolation_in_its_name(tmp_path: Path) -> None:
    write(tmp_path / "a${b}c", "task/mine.yaml", "defaults:\n  - sst2\nname: mine\n")
    with pytest.raises(UserError, match=r"a\$\{b\}c contains '\$\{'; rename the folder"):
        compose.build_config([*SHORT, "task=mine"], str(tmp_path / "a${b}c"))


def test_a_file_that_holds_one_value_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "experiment/e.yaml", "5\n")
    assert f"{path}: expected a mapping" in refused(tmp_path)


def test_empty_labels_are_refused_before_the_data_is_read(tmp_path: Path) -> None:
    write(tmp_path, "experiment/e.yaml", f"{GLOBAL}task:\n  labels: []\n")
    said = refused(tmp_path)
    assert "task.labels is empty" in said
    assert "e.yaml:3" in said
