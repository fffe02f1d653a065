"""The label words: biased, useless and reversed prompts are told apart from sound ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mezo_cli.diagnosis import label_words
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Deadline, Finding, Section
from mezo_cli.diagnosis.label_words import Scores
from mezo_cli.errors import UserError
from mezo_cli.session.opening import Prepared
from tests.diagnosis.sessions import load, named

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
