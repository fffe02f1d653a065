"""Rows to predict: `--text` words, lines, files and rows in memory, of tasks with and without labels."""

import json
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.schema import GeneratePrompt, TaskConfig
from mezo_cli.data import texts
from mezo_cli.errors import UserError
from tests import tiny

LABELS = ["no", "yes"]
PAIR = TaskConfig(name="nli", labels=LABELS, columns=["premise", "hypothesis"], rename={"s1": "premise"})
ONE = TaskConfig(name="tone", labels=LABELS, columns=["text"])
QA = TaskConfig(name="qa", generate=GeneratePrompt(prompt="{context} {question}", answer="{answers[0]}"))


def test_words_of_a_pair_and_of_one_column() -> None:
    words = ["premise=a = b", "hypothesis=c", "hypothesis=d", "premise=e"]
    assert [row.texts for row in texts.from_words(words, PAIR)] == [("a = b", "c"), ("e", "d")]
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
        assert [one.texts for one in texts.from_memory([row], PAIR)] == [("a", "b")]
    assert texts.from_memory([], PAIR) == []
    wrong: list[tuple[Any, str]] = [
        ("a", ", row 1: a str where a mapping of premise, hypothesis is expected"),
        ({"premise": "a"}, ", row 1: column 'hypothesis' is missing"),
        (("a", None), ", row 1: column 'hypothesis' is null"),
        (("a", "\ud800"), ", row 1: column 'hypothesis' contains an unpaired surrogate"),
        (("a", "b", "c"), ", row 1: a tuple where a mapping of premise, hypothesis is expected"),
        (3, ", row 1: a int where"),
    ]
    for row, said in wrong:
        with pytest.raises(UserError, match=f"^rows{said}"):
            texts.from_memory([("a", "b"), row], PAIR)
    with pytest.raises(
        UserError, match=r"^rows: no column 'hypothesis', which task 'nli' reads; the columns are: premise"
    ):
        texts.from_memory([{"premise": "a"}], PAIR)


def test_rows_of_a_task_without_labels_have_the_columns_of_its_prompt(tmp_path: Path) -> None:
    wanted = [{"context": "a", "question": "b?"}]
    words = texts.from_words(["context=a", "question=b?"], QA)
    assert [row.columns for row in words] == wanted
    assert [row.columns for row in texts.from_lines([b"a\tb?"], "lines", QA)] == wanted
    assert texts.from_memory([["a", "b?"]], QA)[0].columns == wanted[0]
    more = {**wanted[0], "numbers": [1, 2], "answers": []}
    assert texts.from_memory([more], QA)[0].columns == more
    (tmp_path / "rows.jsonl").write_text(json.dumps(more) + "\n")
    [row] = texts.from_file(tmp_path / "rows.jsonl", QA)
    assert (row.columns, row.where) == (more, "rows.jsonl:1")
    with pytest.raises(UserError, match="no column 'question', which task 'qa' reads"):
        texts.from_file(tiny.write_jsonl(tmp_path / "other.jsonl", [{"context": "a"}]), QA)
