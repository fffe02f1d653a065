"""Rows and label words: each doubt, and the sound case beside it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.diagnosis import data, label_words
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Finding, Section
from mezo_cli.diagnosis.label_words import Scores
from mezo_cli.errors import UserError
from mezo_cli.models import load_tokenizer
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.session.opening import Prepared
from mezo_cli.tasks.mlm import MlmEncoder
from tests.diagnosis.sessions import load, named, only

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


NAMES = ["negative", "positive"]
LABELS = np.repeat([0, 1], 40)
RANDOM = np.random.RandomState(0)
TOWARDS_NEGATIVE = np.array([5.0, 0.0])
INFORMATIVE = RANDOM.randn(80, 2) + 2.0 * np.eye(2)[LABELS]


def verdicts(scores: np.ndarray, labels: np.ndarray = LABELS, untrained: bool = False) -> dict[str, str]:
    section = Section("label words")
    label_words.judge_scores(section, NAMES, Scores(labels, scores), untrained)
    return {finding.name: finding.verdict for finding in section.findings}


def test_a_sound_prompt_has_no_doubt() -> None:
    assert verdicts(INFORMATIVE) == {"zero_shot_balance": OK, "auc": OK}


def test_a_biased_but_informative_prompt_is_told_from_a_useless_one_and_from_reversed_words() -> None:
    assert verdicts(INFORMATIVE + TOWARDS_NEGATIVE) == {"zero_shot_balance": NOTE, "auc": OK}
    assert verdicts(RANDOM.randn(80, 2) + TOWARDS_NEGATIVE) == {"zero_shot_balance": NOTE, "auc": DOUBT}
    section = Section("label words")
    label_words.judge_scores(section, NAMES, Scores(LABELS, INFORMATIVE[:, ::-1]), False)
    assert "the wrong way round" in section.findings[-1].text
    label_words.judge_scores(section, NAMES, Scores(LABELS, RANDOM.randn(80, 2)), False)
    assert "`mezo data --words`" in section.findings[-1].advice


def test_a_high_auc_of_two_rows_of_a_label_is_too_few_rows_to_tell() -> None:
    """An outside reader had AUC 0.89 on 2 rows of a label, and was told that the score hardly tells them apart."""
    labels = np.repeat([0, 1], [2, 37])
    scores = np.stack([np.zeros(39), [3, 6, *range(3), *range(4, 6), *range(7, 39)]], axis=1)
    section = Section("label words")
    label_words.judge_scores(section, NAMES, Scores(labels, scores), False)
    auc = section.findings[-1]
    assert (auc.name, auc.verdict) == ("auc", UNKNOWN)
    assert auc.figures["auc"] > 0.85
    assert "too few rows to tell" in auc.text
    assert "2 of 'negative'" in auc.text


def test_nothing_is_expected_of_a_new_head_and_of_one_label_nothing_is_known() -> None:
    assert verdicts(RANDOM.randn(80, 2) + TOWARDS_NEGATIVE, untrained=True) == {"zero_shot_balance": OK, "auc": OK}
    assert verdicts(INFORMATIVE[:40], LABELS[:40]) == {"auc": UNKNOWN}


def findings(prepared: Prepared) -> dict[str, Finding]:
    return named(label_words.check(prepared, Deadline(60.0)))


def with_bias(model: Path, change: float, labels: int = 1) -> Prepared:
    """Load a model whose bias of the first words is changed: of that for `negative`, or of both."""
    prepared = load(model)
    session = prepared.session
    with torch.no_grad():
        session.loaded.model.lm_head.bias[session.encoder.label_ids[:labels]] += change
    return prepared


def test_the_models_own_words_and_a_biased_decoder(roberta: Path) -> None:
    prepared = with_bias(roberta, 30.0)
    found, negative = findings(prepared), prepared.session.encoder.label_ids[0]
    assert found["tokens"].figures["tokens"]["negative"] == [negative]
    assert found["top_words"].figures["top"][0]["token"] == negative
    assert len(found["top_words"].figures["top"]) == 10
    assert found["zero_shot_balance"].verdict == NOTE
    assert found["label_word_share"].verdict == OK


def test_words_that_the_model_never_writes_are_a_doubt(roberta: Path) -> None:
    assert findings(with_bias(roberta, -30.0, labels=2))["label_word_share"].verdict == DOUBT


def test_scores_that_are_not_finite_end_with_trains_line(roberta: Path) -> None:
    with pytest.raises(UserError, match="not finite before the first step"):
        findings(with_bias(roberta, float("nan")))


def test_a_new_head_is_named_and_scores_no_words(roberta: Path) -> None:
    found = findings(load(roberta, "objective=cls"))
    assert set(found) == {"tokens", "start", "zero_shot_balance", "auc"}
    assert all(one.verdict == OK for one in found.values())
