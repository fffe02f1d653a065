"""A function as `objective.reward` comes from the command line, the API or the environment, never from a file."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mezo_cli.config import own_code
from mezo_cli.config.compose import build_config
from mezo_cli.config.file_rules import check_file
from mezo_cli.config.registry import OBJECTIVES
from mezo_cli.config.schema import Config, ObjectiveConfig
from mezo_cli.config.stored import read_config, to_yaml
from mezo_cli.errors import UserError

pytestmark = pytest.mark.usefixtures("composing_all")


def split_reward(overrides: list[str]) -> tuple[list[str], str | None]:
    rest, own = own_code.split_own_code(overrides)
    return rest, own.get(own_code.REWARD)


def test_a_function_is_taken_out_of_the_overrides_with_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("reward.py:f", "'reward.py:f'", '"reward.py:f"'):
        overrides, reward = split_reward(["lr=1", f"objective.reward={word}", "seed=2"])
        assert (overrides, reward) == (["lr=1", "seed=2"], f"{tmp_path}/reward.py:f")
    assert split_reward(["objective.reward=shuffled:a/b.py:f"]) == ([], f"shuffled:{tmp_path}/a/b.py:f")
    assert split_reward(["objective.reward=package.module:f"]) == ([], "package.module:f")
    assert split_reward(["objective.reward=a.py:f", "objective.reward=f1"]) == (["objective.reward=f1"], None)


@pytest.mark.parametrize("value", ["f1", "exact,f1", "{format: {pattern: 'a:b'}}", " {a: 1}", "shuffled:f1", "null"])
def test_registered_names_stay_among_the_overrides(value: str) -> None:
    assert split_reward([f"objective.reward={value}"]) == ([f"objective.reward={value}"], None)


@pytest.mark.parametrize("value", ["a.py:f,b.py:f", "${oc.env:X}"])
def test_one_function_is_given(value: str) -> None:
    with pytest.raises(UserError, match="expected one function"):
        split_reward([f"objective.reward={value}"])


@pytest.mark.parametrize(
    ("group", "content"),
    [
        ("objective", "reward: reward.py:score"),
        ("objective", "reward: shuffled:package:score"),
        ("experiment", "# @package _global_\nobjective:\n  reward: reward.py:score"),
        ("experiment", "# @package _global_\nhydra:\n  sweeper:\n    params:\n      objective.reward: reward.py:score"),
    ],
)
def test_a_file_names_no_function(group: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / "choice.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=r"choice\.yaml.*only the command line"):
        check_file(path, group, yaml.safe_load(content), {})
    path.write_text("reward: {format: {weight: 0.1, pattern: 'a:b'}, f1: 1}")
    check_file(path, "objective", yaml.safe_load(path.read_text()), {})


def test_a_sweeps_record_names_no_function(tmp_path: Path) -> None:
    own_code.check_stored(["objective.reward={format: {pattern: 'a:b'}}", "objective.reward=f1"], tmp_path)
    for word in ("objective.reward=reward.py:f", "++objective.reward='reward.py:f'"):
        with pytest.raises(UserError, match="only the command line"):
            own_code.check_stored([word], tmp_path)


def test_what_does_not_read_a_function_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="objective=mlm does not read it, only objective=generate"):
        build_config(["task=sst2", "model=demo", "data=demo", f"objective.reward={tmp_path}/reward.py:score"])


def test_the_jobs_of_a_sweep_get_it_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(own_code.REWARD_VARIABLE, raising=False)
    with own_code.for_workers({own_code.REWARD: "/x/reward.py:score"}):
        assert os.environ["MEZO_REWARD"] == "/x/reward.py:score"
    assert "MEZO_REWARD" not in os.environ


@dataclass(frozen=True)
class Rewarded(ObjectiveConfig):
    reward: str | None = None


class RewardedObjective:
    settings = Rewarded


@pytest.fixture
def config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an objective that has a reward, which a plug-in defines."""
    monkeypatch.delenv(own_code.REWARD_VARIABLE, raising=False)
    monkeypatch.setitem(OBJECTIVES.targets, "rewarded", f"{__name__}:RewardedObjective")
    (tmp_path / "objective").mkdir()
    (tmp_path / "objective" / "rewarded.yaml").write_text("name: rewarded\nloss: cross_entropy\n")
    return tmp_path


def compose(config_dir: Path, *words: str) -> Config:
    return build_config(["task=sst2", "model=demo", "data=demo", "objective=rewarded", *words], str(config_dir))


def test_a_function_is_in_the_config_and_not_in_what_is_stored(
    config_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(config_dir, "objective.reward=/x/reward.py:score")
    assert config.objective.reward == own_code.reward_of(config) == "/x/reward.py:score"
    assert own_code.own_code_used(config)
    (config_dir / "config.yaml").write_text(to_yaml(config))
    assert "reward.py" not in (config_dir / "config.yaml").read_text()
    stored = read_config(config_dir / "config.yaml")
    assert not own_code.own_code_used(stored)
    monkeypatch.setenv(own_code.REWARD_VARIABLE, "/x/reward.py:score")
    assert own_code.own_code_used(stored)
    somebody_elses = to_yaml(config).replace("reward: null", "reward: /y/reward.py:score")
    (config_dir / "config.yaml").write_text(somebody_elses)
    assert own_code.reward_of(read_config(config_dir / "config.yaml")) == "/x/reward.py:score"


def test_a_name_is_stored_and_a_reference_to_a_function_is_refused(config_dir: Path) -> None:
    config = compose(config_dir, "objective.reward=f1")
    assert "reward: f1\n" in to_yaml(config)
    assert not own_code.own_code_used(config)
    with pytest.raises(UserError, match="only the command line"):
        compose(config_dir, "task.name='a:b'", "objective.reward=${task.name}")
