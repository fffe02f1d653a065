"""What `objective.reward` may be, and the built-in rewards: conformance, cases by hand, settings, mistakes."""

import hashlib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from mezo_cli.config.base import SettingError
from mezo_cli.config.registry import REWARDS
from mezo_cli.rewards.built_in import answer_number, find_expression, value_of
from mezo_cli.rewards.scoring import Reward
from mezo_cli.rewards.spec import describe_change, parse_reward
from mezo_cli.testing import rewards
from tests.test_extending import installed

FIVE = {"numbers": [3, 5, 7], "target": 9}
HALF = {"numbers": [1, 2], "target": 0.5}


class TestExact(rewards.Conformance):
    name = "exact"
    cases: ClassVar = [
        (" Paris", {}, ["Paris"], 1),
        ("paris", {}, ["Paris"], 0),
        ("Rome\n", {}, ["Paris", "Rome "], 1),
        ("", {}, [], 0),
    ]


class TestEm(rewards.Conformance):
    name = "em"
    cases: ClassVar = [
        (" The Eiffel-Tower!", {}, ["an eiffeltower"], 1),
        ("Paris, France", {}, ["Paris"], 0),
        ("Rome", {}, ["Paris", "the rome"], 1),
    ]


class TestF1(rewards.Conformance):
    name = "f1"
    cases: ClassVar = [
        ("in the city of Paris", {}, ["Paris"], 2 * 0.25 / 1.25),
        ("Paris", {}, ["in Paris", "the Paris"], 1),
        ("red red blue", {}, ["red blue blue"], 2 / 3),
        ("no idea", {}, ["no answer"], 0),  # words in common count nothing where there is no answer
        (" No answer.", {}, ["no answer", "Paris"], 1),
        ("cannotanswer!", {}, ["CANNOTANSWER"], 1),
        ("an answer", {}, ["Paris", "no answer"], 1 / 1.5),  # the first gold answer decides
        ("2 goals by Lind", {}, ["Berg", "Lind, 2", "goals"], 2 * 0.5 / 1.5),
        ("", {}, ["Paris"], 0),
        ("Rome", {}, ["Paris"], 0),
    ]


class TestContains(rewards.Conformance):
    name = "contains"
    cases: ClassVar = [("it is Paris, of course", {}, ["Rome", " Paris "], 1), ("it is paris", {}, ["Paris"], 0)]


class TestNumber(rewards.Conformance):
    name = "number"
    cases: ClassVar = [
        ("so 3 + 4 = 7.", {}, ["#### 7"], 1),
        ("about $1,234.50 in all", {}, ["1234.5"], 1),
        (r"\boxed{12} is the answer, not 13", {}, ["12"], 1),
        (r"\boxed{\frac{3}{2}} or 2", {}, ["2"], 0),
        ("#### 8\nI checked it 3 times", {}, ["8"], 1),
        ("none at all", {}, ["none at all"], 0),
        ("10-3", {}, ["3"], 1),
        ("x = -3", {}, ["3"], 0),
    ]


class TestFormat(rewards.Conformance):
    name = "format"
    settings: ClassVar = {"pattern": r"(?s)^<think>.*</think>$", "weight": 0.5}
    cases: ClassVar = [("<think>a\nb</think>", {}, [], 0.5), (" <think></think>", {}, [], 0), ("no", {}, [], 0)]


class TestLength(rewards.Conformance):
    name = "length"
    settings: ClassVar = {"column": "summary", "weight": 0.1}
    cases: ClassVar = [
        (" 12345", {"summary": "123"}, [], -0.2),
        ("12", {"summary": 5}, [], -0.3),
        ("x", {"summary": "y"}, [], 0),
    ]


class TestCountdown(rewards.Conformance):
    name = "countdown"
    settings: ClassVar = {"tag": "answer", "numbers_used": 0.1}
    cases: ClassVar = [
        ("<answer> (7 + 5) - 3 </answer>", FIVE, [], 1.1),
        ("<answer>1</answer> no: <answer>7+5-3</answer>", FIVE, [], 1.1),
        ("<answer>3*5+7</answer>", FIVE, [], 0.1),
        ("<answer>7+2</answer>", FIVE, [], 0),
        ("<answer>3+5+7-3-3</answer>", FIVE, [], 0),
        ("<answer>7+5-3=9</answer>", FIVE, [], 0),
        ("7+5-3", FIVE, [], 0),
        ("<answer>1/2</answer>", HALF, [], 1.1),
        ("<answer>1/(2-2)</answer>", HALF, [], 0),
        ("<answer>2**1</answer>", HALF, [], 0),
        ("<answer>__import__('os')</answer>", HALF, [], 0),
    ]


class TestCountdownWithoutTags(rewards.Conformance):
    name = "countdown"
    cases: ClassVar = [("A7+5-3", FIVE, [], 1), ("It is (7+5)-3.", FIVE, [], 1), ("no expression", FIVE, [], 0)]


def test_every_built_in_reward_is_tested_here() -> None:
    classes = [value for value in globals().values() if isinstance(value, type)]
    assert {one.name for one in classes if issubclass(one, rewards.Conformance)} == set(REWARDS.built_in)


VALUES = "2+3*4=14 (2+3)*4=20 8/4/2=1 7-2-1=4 -3+5=2 2*-3=-6 1/3=1/3 1/3+1/3+1/3=1 007+1=8"


@pytest.mark.parametrize("case", VALUES.split())
def test_expressions_are_computed_exactly(case: str) -> None:
    text, expected = case.split("=")
    assert value_of(text) == Fraction(expected)


@pytest.mark.parametrize("text", ["1/0", "(1", "1)", "1 2", "1+", "", "2//1", "()"])
def test_what_is_no_expression_has_no_value(text: str) -> None:
    assert value_of(text) is None


def test_a_deeply_nested_expression_is_no_answer_or_a_number() -> None:
    assert find_expression("(" * 5000 + "1" + ")" * 5000, None) is None
    text = "(" * 99 + "1" + ")" * 99
    assert value_of(find_expression(text, None) or "") == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234 and 12,345.5", Fraction("12345.5")),
        ("the 2nd of .5", Fraction("0.5")),
        (r"first \boxed{1}, then \boxed{ -2{,}5 }", None),
        (r"\boxed{-\$1,000}", Fraction(-1000)),
        ("#### 5\n#### 6 apples", 6),
        ("2024-05", 5),
        ("\u22124", -4),
        ("9" * 5000, None),
    ],
)
def test_the_number_of_an_answer(text: str, number: Fraction | None) -> None:
    assert answer_number(text) == number


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
