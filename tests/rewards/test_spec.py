"""What `objective.reward` may be, and the one line for what it may not."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mezo_cli.config.base import SettingError
from mezo_cli.rewards.scoring import Reward
from mezo_cli.rewards.spec import describe_change, parse_reward
from tests.test_extending import installed


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("f1", "f1"),
        ("shuffled:number", "shuffled:number"),
        ({"countdown": 1, "format": {"weight": 0.1, "pattern": "a:b"}}, "countdown + 0.1 format"),
        ({"length": {"column": "summary"}}, "length"),
    ],
)
def test_names_are_registered_and_have_no_code_of_the_user(setting: Any, text: str) -> None:
    spec = parse_reward(setting)
    assert spec.describe() == text
    assert (spec.in_process, spec.sha256) == (False, None)


@pytest.mark.parametrize("name", ["reward.py:score", "shuffled:reward.py:score"])
def test_a_function_is_recorded_with_its_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text("raise SystemExit\n")  # it is not run here
    spec = parse_reward(name)
    sha256 = hashlib.sha256(b"raise SystemExit\n").hexdigest()
    assert spec.record() == {"name": name, "sha256": sha256, "in_process": False}
    config, info = SimpleNamespace(objective=SimpleNamespace(reward=name)), {"reward": {"sha256": sha256}}
    assert describe_change(config, info) == ""
    Path("reward.py").write_text("raise SystemExit(1)\n")
    assert f"not what the run was trained on (sha256 {sha256[:12]}, " in describe_change(config, info)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (None, "objective.reward=null: expected a name"),
        ("", "expected a name"),
        ("extact", "did you mean 'exact'?"),
        ("format", "objective.reward.format.pattern is not set: give objective.reward.format.pattern=..."),
        ("shuffled:length:x", "no module 'length'"),
        ({"format": {"pattern": "("}}, "objective.reward.format.pattern=(: not a regular expression"),
        (
            {"format": {"patern": "x"}},
            "'objective.reward.format.patern' (did you mean 'objective.reward.format.pattern'?",
        ),
        ({"exact": "much"}, "objective.reward.exact.weight=much"),
        ({"exact": float("inf")}, "objective.reward.exact.weight=inf"),
        ({"exact": 0, "f1": 0.0}, "all weights are 0"),
        ({"reward.py:score": 1}, "stands by itself"),
        ("nosuch.py:score", "nosuch.py: No such file"),
        ("not a module:score", "expected a name"),
        ("sys:exit", "no module 'sys' with a file"),
        ({"countdown": {"numbers_used": "a"}}, "objective.reward.countdown.numbers_used=a"),
    ],
)
def test_a_mistake_is_one_line(setting: Any, words: str) -> None:
    with pytest.raises(SettingError) as error:
        parse_reward(setting)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


PLUGIN = """
from mezo_cli.config.base import Number, Settings

class Scaled(Settings):
    column: str
    factor: Number = 2.0

    def __call__(self, completions, rows):
        return [row[self.column] * self.factor for row in rows]

def constant(completions, rows):
    return [0.5] * len(rows)
"""

BATCH: Any = {"rows": [{"x": 4}], "golds": [[]], "seed": [0], "completions": ["a"], "prompts": [""], "locations": ["r"]}


def test_a_package_adds_names_by_entry_points(tmp_path: Path) -> None:
    (tmp_path / "reward_plugin.py").write_text(PLUGIN)
    points = {"scaled": "reward_plugin:Scaled", "constant": "reward_plugin:constant"}
    with installed(tmp_path, "reward-plugin", {"mezo.rewards": points}):
        spec = parse_reward({"scaled": {"column": "x", "weight": 3}, "constant": 1})
        with Reward(spec) as reward:
            assert reward.score(BATCH).values.tolist() == [24.5]
        with pytest.raises(SettingError, match=r"objective\.reward\.scaled\.column is not set"):
            parse_reward("scaled")
