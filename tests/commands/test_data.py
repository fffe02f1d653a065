"""`mezo data`: class balance, lengths and prompts; the few-shot files; proposed label words."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from mezo_cli.commands.propose_words import FIRST, choose_words
from tests import tiny
from tests.command_line import error_line, mezo, ok

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_data_shows_balance_lengths_and_prompts(roberta: Path, movies: Path) -> None:
    words = ["task=sst2", f"model.path={roberta}", "data=files", f"data.dir={movies}"]
    said = ok("data", *words)
    assert [line.split() for line in said.out.splitlines()[:4]] == [
        ["rows", "per", "label", "negative", "positive"],
        ["train", "12", "12"],
        ["dev", "6", "6"],
        ["test", "6", "6"],
    ]
    for label, word in (("negative", "terrible"), ("positive", "great")):
        assert f"It was<mask>.</s>   [{label} -> '{word}'; " in said.out
    plain = ok("data", "objective=cls", *words)
    assert "<mask>" not in plain.out
    assert "   [negative; " in plain.out


def test_the_few_shot_files(movies: Path, tmp_path: Path) -> None:
    assert mezo("data", "data=files", f"data.dir={movies}", "data.shots=3", "--export", "out").code == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert sorted(row["label"] for row in rows) == ["negative"] * 3 + ["positive"] * 3


def test_data_shows_prompts_and_answers(sums: list[object]) -> None:
    said = ok("data", *sums)
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == ["tokens", "per", "prompt", "min", "median", "p95", "max", "rows", "cut"]
    assert [(line[0], *line[-2:]) for line in lines[1:3]] == [("train", "18", "0"), ("dev", "2", "0")]
    assert lines[4] == ["tokens", "per", "answer", "min", "median", "p95", "max"]
    shown = r"  Add \[(\d+), 1\]: \1 \+ 1\?\\nAnswer: -> ' \d+\\n'   \[rows.jsonl:\d+; \d+ \+ \d+ tokens\]"
    assert len(re.findall(shown, said.out)) == 3
    assert "label" not in said.out
    cut = mezo("data", *sums, "task.generate.max_length=16", "task.generate.too_long=cut")
    assert cut.out.splitlines()[1].split()[-2:] == ["18", "18"]
    assert ", cut]" in cut.out


def test_the_files_of_rows_without_labels(sums: list[object], tmp_path: Path) -> None:
    assert mezo("data", *sums, "data.train_size=5", "data.dev_size=3", "--export", tmp_path / "out").code == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert set(rows[0]) == {"question", "numbers", "answers", "id"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.generate.max_length=16"], "tokens of prompt and answer, and the limit is 16"),
        (["objective.max_new_tokens=300", "task.metric=f1"], "objective.max_new_tokens=300: the limit of 300 tokens"),
        (["objective.max_new_tokens=290", "task.metric=f1"], "tokens of prompt and objective.max_new_tokens=290, and"),
        (["task.generate.stop=['']"], "task.generate.stop"),
        (["objective=mlm", "objective.loss=accuracy"], "task.template is not set"),
    ],
)
def test_mistakes_of_tasks_without_labels(words: list[str], said: str, sums: list[object]) -> None:
    refused = mezo("data", *sums, *words)
    assert refused.code == 2
    assert said in refused.err.splitlines()[-1]


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
