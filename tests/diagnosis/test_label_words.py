"""The label words: biased, useless and reversed prompts are told apart from sound ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.diagnosis import label_words
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Section
from mezo_cli.diagnosis.label_words import DevScores
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.errors import UserError
from mezo_cli.training.load import load_session
from tests import tiny

NAMES = ["negative", "positive"]
LABELS = np.repeat([0, 1], 40)
RANDOM = np.random.RandomState(0)
TOWARDS_NEGATIVE = np.array([5.0, 0.0])
INFORMATIVE = RANDOM.randn(80, 2) + 2.0 * np.eye(2)[LABELS]


def verdicts(scores: np.ndarray, labels: np.ndarray = LABELS, untrained: bool = False) -> dict[str, str]:
    section = Section("label words")
    label_words.judge_scores(section, NAMES, scores, labels, untrained)
    return {finding.name: finding.verdict for finding in section.findings}


def test_a_sound_prompt_has_no_doubt() -> None:
    assert verdicts(INFORMATIVE) == {"zero_shot_balance": OK, "auc": OK}


def test_a_biased_but_informative_prompt_is_told_from_a_useless_one() -> None:
    assert verdicts(INFORMATIVE + TOWARDS_NEGATIVE) == {"zero_shot_balance": NOTE, "auc": OK}
    assert verdicts(RANDOM.randn(80, 2) + TOWARDS_NEGATIVE) == {"zero_shot_balance": NOTE, "auc": DOUBT}


def test_reversed_words_are_named() -> None:
    section = Section("label words")
    label_words.judge_scores(section, NAMES, INFORMATIVE[:, ::-1], LABELS, False)
    assert "the wrong way round" in section.findings[-1].text


def test_a_high_auc_of_two_rows_of_a_label_is_too_few_rows_to_tell() -> None:
    """An outside reader had AUC 0.89 on 2 rows of a label, and was told that the score hardly tells them apart."""
    labels = np.repeat([0, 1], [2, 37])
    scores = np.stack([np.zeros(39), [3, 6, *range(3), *range(4, 6), *range(7, 39)]], axis=1)
    section = Section("label words")
    label_words.judge_scores(section, NAMES, scores, labels, False)
    auc = section.findings[-1]
    assert (auc.name, auc.verdict) == ("auc", UNKNOWN)
    assert auc.figures["auc"] > 0.85
    assert "too few rows to tell" in auc.text
    assert "2 of 'negative'" in auc.text


def test_nothing_is_expected_of_a_new_head_and_of_one_label_nothing_is_known() -> None:
    assert verdicts(RANDOM.randn(80, 2) + TOWARDS_NEGATIVE, untrained=True) == {"zero_shot_balance": OK, "auc": OK}
    assert verdicts(INFORMATIVE[:40], LABELS[:40]) == {"auc": UNKNOWN}


def test_what_a_removed_bias_gives_is_named() -> None:
    section, seen = (
        Section("label words"),
        DevScores(LABELS, INFORMATIVE + TOWARDS_NEGATIVE, [], np.empty((80, 0)), None),
    )
    label_words.name_removed_bias(section, seen, seen)
    (finding,) = section.findings
    plain = (INFORMATIVE.argmax(axis=1) == LABELS).mean()
    for accuracy in finding.figures["accuracy"].values():
        assert accuracy == pytest.approx(plain, abs=0.03)
    assert f"{100 * finding.figures['accuracy']['best_threshold']:.1f}% (threshold: best on train" in finding.text


# --- on a model ---


def prepared(model: Path, *words: str) -> Prepared:
    session = load_session(build_config([f"model.path={model}", "task=sst2", "data=demo", *words]))
    rows = [Example((row["sentence"],), int(row["label"] == "positive")) for row in tiny.movie_rows(40)]
    encoded = session.encoder.encode_all(rows)
    return Prepared(session, encoded, encoded, None, {}, 0.0)


def findings(given: Prepared) -> dict[str, object]:
    return {one.name: one for one in label_words.check(given, Deadline(60.0)).findings}


@pytest.mark.parametrize("kind", ["mlm", "lm"])
def test_the_whole_vocabulary_has_the_label_words_scores(kind: str, tmp_path: Path) -> None:
    model = tiny.roberta(tmp_path / "m") if kind == "mlm" else tiny.decoder(tmp_path / "m")
    session = prepared(model, f"objective={kind}").session
    batch = session.batch(session.encoder.encode_all([Example(("good",), 0), Example(("it was bad",), 1)]))
    with torch.no_grad():
        own, every = session.objective.logits(batch), session.objective.vocabulary_logits(batch)
    assert every is not None
    assert every.shape == (2, len(session.loaded.tokenizer))
    columns = label_words._label_columns(session)
    if columns:
        assert torch.allclose(every[:, columns], own, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(session.objective.logits(batch), own)  # the objective scores its label words again


def test_the_models_own_words_and_a_biased_decoder(roberta: Path) -> None:
    given = prepared(roberta)
    negative = given.session.encoder.label_ids[0]
    with torch.no_grad():
        given.session.loaded.model.lm_head.bias[negative] += 30.0
    found = findings(given)
    assert found["tokens"].figures["tokens"]["negative"] == [negative]  # type: ignore[attr-defined]
    assert found["top_words"].figures["top"][0]["token"] == negative  # type: ignore[attr-defined]
    assert len(found["top_words"].figures["top"]) == 10  # type: ignore[attr-defined]
    assert found["zero_shot_balance"].verdict == NOTE  # type: ignore[attr-defined]
    assert found["label_word_share"].verdict == OK  # type: ignore[attr-defined]


def test_words_that_the_model_never_writes_are_a_doubt(roberta: Path) -> None:
    given = prepared(roberta)
    with torch.no_grad():
        given.session.loaded.model.lm_head.bias[given.session.encoder.label_ids] -= 30.0
    found = findings(given)
    assert found["label_word_share"].verdict == DOUBT  # type: ignore[attr-defined]


def test_a_label_word_far_rarer_than_the_others_is_found(roberta: Path) -> None:
    given = prepared(roberta)
    with torch.no_grad():
        given.session.loaded.model.lm_head.bias[given.session.encoder.label_ids[0]] -= 6.0
    rare = findings(given)["rare_label_words"]
    assert rare.verdict == DOUBT  # type: ignore[attr-defined]
    assert rare.figures["rare"] == ["negative"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("probabilities", "rare"),
    [([0.02, 0.0003], []), ([0.02, 0.0002], ["b"]), ([0.03, 0.0002, 0.02], ["b"]), ([0.5, 0.001, 0.001], ["b", "c"])],
)
def test_rare_is_a_hundredth_of_the_other_words(probabilities: list[float], rare: list[str]) -> None:
    section, names = Section("label words"), ["a", "b", "c"][: len(probabilities)]
    label_words.judge_rare_words(section, names, names, probabilities)
    (found,) = section.findings
    assert (found.verdict, found.figures["rare"]) == (DOUBT if rare else OK, rare)


def test_better_words_are_usable_and_labelled_as_chosen_on_dev(roberta: Path) -> None:
    given = prepared(roberta)
    session, other = given.session, given.session.encoder.word_id("Human")
    section = Section("label words")
    scores = RANDOM.randn(80, 2)
    seen = label_words.DevScores(LABELS, scores, [other or 0], 9.0 * LABELS[:, None], None)
    label_words._name_better_words(section, session, seen)
    (found,) = section.findings
    assert found.verdict == NOTE
    assert found.figures["words"]["positive"] == "Human"
    assert found.figures["chosen_on"] == "dev"
    assert "dev" in found.text


def test_scores_that_are_not_finite_end_with_trains_line(roberta: Path) -> None:
    given = prepared(roberta)
    with torch.no_grad():
        given.session.loaded.model.lm_head.bias[:] = float("nan")
    with pytest.raises(UserError, match="its loss is not finite before the first step"):
        findings(given)


def test_a_new_head_is_named_and_scores_no_words(roberta: Path) -> None:
    found = findings(prepared(roberta, "objective=cls"))
    assert set(found) == {"tokens", "start", "zero_shot_balance", "auc"}
    assert all(one.verdict == OK for one in found.values())  # type: ignore[attr-defined]


def test_time_cuts_rows_and_says_so(roberta: Path) -> None:
    section = label_words.check(prepared(roberta), Deadline(0.0))
    assert section.cut == ["24 of 40 dev rows"]
