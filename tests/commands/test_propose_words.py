"""Proposed label words: those that tell the labels apart are found, and the printed line is a setting that holds."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from mezo_cli.commands.propose_words import FIRST, choose_words
from tests import tiny
from tests.command_line import error_line, mezo


@pytest.mark.parametrize("count", [2, 3])
def test_the_words_that_tell_the_labels_apart_are_the_best(count: int) -> None:
    """Column 10 k is likelier in rows of label k, column 10 k + 1 a little."""
    random, labels = np.random.RandomState(0), np.repeat(range(count), 50)
    scores = random.randn(len(labels), 60)
    for label in range(count):
        scores[labels == label, 10 * label] += 4.0
        scores[labels == label, 10 * label + 1] += 2.0
    best, choices = choose_words(scores, labels)
    assert [words[:2] for words in best] == [[10 * label, 10 * label + 1] for label in range(count)]
    assert {len(words) for words in best} == {FIRST}
    assert choices[0] == [10 * label for label in range(count)]


@pytest.mark.parametrize("kind", ["mlm", "lm"])
def test_the_words_are_a_setting_whatever_the_tasks_own_are(kind: str, tmp_path: Path) -> None:
    model = tiny.roberta(tmp_path / "m") if kind == "mlm" else tiny.decoder(tmp_path / "m")
    words = ["task=sst2", f"objective={kind}", f"model.path={model}", "data=files"]
    words.append(f"data.dir={tiny.movie_folder(tmp_path / 'movies', train=64)}")
    assert '["terrible", "great"]\'  now' in mezo("data", "--words", *words).out
    unknown = "task.label_words=[mesmerizingly,good]"  # more than a token of the tiny vocabulary
    (line,) = shlex.split(mezo("data", "--words", *words, unknown).out.splitlines()[4].split(")")[1])
    assert mezo("data", *words, line).code == 0
    if kind == "mlm":
        for command in ("data", "doctor"):
            assert "`mezo data --words` with the same" in error_line(mezo(command, *words, unknown))


def test_what_has_no_words_to_propose_is_one_line(roberta: Path, movies: Path) -> None:
    words = ["data", "--words", "task=sst2", f"model.path={roberta}", "data=files", f"data.dir={movies}"]
    assert "needs 16 rows of each label in train; of 'negative' 12" in error_line(mezo(*words))
    assert "objective=cls reads no label words" in error_line(mezo(*words, "objective=cls"))
    assert "--words and --export" in error_line(mezo(*words, "--export", "out"))
