"""Texts without labels: `--text` words, lines and rows of a task of two columns."""

from typing import Any

import pytest

from mezo_cli.config.schema import TaskConfig
from mezo_cli.data import texts
from mezo_cli.errors import UserError

PAIR = TaskConfig(name="nli", template="", columns=["premise", "hypothesis"], rename={"s1": "premise"})
ONE = TaskConfig(name="tone", template="", columns=["text"])


def test_words_of_a_pair() -> None:
    words = ["premise=a = b", "hypothesis=c", "hypothesis=d", "premise=e"]
    assert [row.texts for row in texts.from_words(words, PAIR)] == [("a = b", "c"), ("e", "d")]


def test_words_of_one_column() -> None:
    assert [row.texts for row in texts.from_words(["a=b", "text=c"], ONE)] == [("a=b",), ("c",)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a text"], "task 'nli' reads premise, hypothesis"),
        (["premis=a"], "did you mean 'premise'"),
        (["premise=a"], "lacks hypothesis"),
        (["premise=a", "premise=b"], "once per row"),
        (["premise=a", "hypothesis= "], "needs a text"),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        texts.from_words(words, PAIR)
    assert said in str(error.value)


def test_lines_of_a_pair() -> None:
    assert [row.texts for row in texts.from_lines([b"a\tb\r\n", b"\n", b"c\t d"], "in", PAIR)] == [
        ("a", "b"),
        ("c", " d"),
    ]
    with pytest.raises(UserError, match=r"in:1: 1 field, expected 2 \(premise, hypothesis\), separated by tabs"):
        list(texts.from_lines([b"a\n"], "in", PAIR))


def test_rows_in_memory() -> None:
    for row in ({"premise": "a", "hypothesis": "b", "id": 3}, ("a", "b"), ["a", "b"]):
        assert texts.from_row(row, "row 0", PAIR).texts == ("a", "b")
    wrong: list[tuple[Any, str]] = [
        ("a", "one text, but task 'nli' reads premise, hypothesis"),
        ({"premise": "a"}, "no column 'hypothesis'"),
        (("a", None), "column 'hypothesis' is null"),
        (("a", "\ud800"), "column 'hypothesis' contains an unpaired surrogate"),
        (("a", "b", "c"), "not a text, nor a mapping"),
        (3, "not a text, nor a mapping"),
    ]
    for row, said in wrong:
        with pytest.raises(UserError, match=f"row 7: {said}"):
            texts.from_row(row, "row 7", PAIR)
