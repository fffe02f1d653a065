"""The built-in rewards: the conformance tests, with cases worked out by hand, and their settings."""

from fractions import Fraction
from typing import ClassVar

import pytest

from mezo_cli.config.registry import REWARDS
from mezo_cli.rewards.built_in import answer_number, find_expression, value_of
from mezo_cli.testing import rewards

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
