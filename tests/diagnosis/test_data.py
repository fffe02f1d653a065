"""Balance, cut prompts, repeated and shared rows, empty texts: each doubt, and the sound case beside it."""

from pathlib import Path

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.diagnosis import data
from mezo_cli.diagnosis.findings import DOUBT, OK, Finding, Section
from mezo_cli.models import load_tokenizer
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.tasks.mlm import MlmEncoder
from tests.diagnosis.sessions import only

TASK = build_config(["task=sst2", "data=demo"]).task


def rows(n: int, start: int = 0) -> list[Example]:
    return [Example((f"row number {i}",), i % 2) for i in range(start, start + n)]


def judged(check: object, *values: object) -> Finding:
    section = Section("data")
    check(section, *values)  # type: ignore[operator]
    return only(section)


@pytest.mark.parametrize(
    ("columns", "texts", "verdict"),
    [
        (["sentence", "label"], ["a film", "1"], DOUBT),  # the column that the labels are read from
        (["sentence", "mood"], ["a film", " Negative"], DOUBT),  # a copy of it
        (["sentence", "mood"], ["a film", "terrible"], DOUBT),  # the label's word
        (["sentence", "mood"], ["negative", "a film"], DOUBT),
        (["sentence", "mood"], ["a film", "positive"], OK),  # the other label
    ],
)
def test_a_label_in_the_prompt(columns: list[str], texts: list[str], verdict: str) -> None:
    named = {"train": [Example(tuple(texts), 0)] * 20, "dev": [Example(tuple(texts), 0)]}
    found = judged(data.judge_leak, named, TASK.replace(columns=columns))
    assert found.verdict == verdict
    leaked = columns[0] if texts[0] == "negative" else columns[1]
    assert found.figures["column"] == (leaked if verdict == DOUBT else None)


def test_repeated_rows() -> None:
    assert judged(data.judge_repeated_rows, {"train": rows(20)}).verdict == OK
    again = [Example(("  Row number 0",), 1), Example(("row number 1",), 1)]
    found = judged(data.judge_repeated_rows, {"train": [*rows(20), *again]})
    assert found.verdict == DOUBT
    assert found.figures["splits"]["train"] == {"repeated": 2, "other_label": 1, "share": pytest.approx(2 / 22)}


def test_shared_rows() -> None:
    named = {"train": rows(20), "dev": rows(10, 20), "test": rows(10, 30)}
    assert judged(data.judge_rows_in_two_splits, named).verdict == OK
    found = judged(data.judge_rows_in_two_splits, {**named, "test": rows(10, 19)})
    assert found.verdict == DOUBT
    assert found.figures["splits"]["test_in_train"] == {"rows": 1, "share": 0.1}
    assert found.figures["splits"]["test_in_dev"]["rows"] == 9


def test_empty_texts() -> None:
    assert judged(data.judge_empty_texts, {"train": rows(20)}, TASK).verdict == OK
    found = judged(data.judge_empty_texts, {"train": [*rows(20), Example(("  ",), 0, "train.tsv:22")]}, TASK)
    assert found.verdict == DOUBT
    assert "train.tsv:22, column 'sentence'" in found.text


def test_a_cut_sentence_is_a_doubt_and_some_rows_are_read(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = build_config([f"model.path={roberta}", "data=demo", "task.first_limit=4"])
    encoder = MlmEncoder(given.task, load_tokenizer(given.model, OBJECTIVES.implementation("mlm").model_kind))

    def cut(examples: list[Example]) -> tuple[str, int, int]:
        found = judged(data.judge_cut_prompts, encoder, {"train": examples})
        return found.verdict, found.figures["cut"], found.figures["of"]

    good, long = Example(("good",), 0), Example(("good " * 9,), 0)
    assert cut([good, good]) == (OK, 0, 2)
    assert cut([good, long]) == (DOUBT, 1, 2)
    assert encoder.tokenizer.model_max_length == 64  # `without_limits` leaves the tokenizer as it was
    monkeypatch.setattr(data, "LOOKED_AT", 2)
    assert cut([good, long, good]) == (OK, 0, 2)
