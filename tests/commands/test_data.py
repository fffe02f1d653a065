"""`mezo data`: class balance, lengths and prompts; the few-shot files."""

import json
import re
from pathlib import Path

import pytest

from tests.command_line import mezo

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_data_shows_balance_lengths_and_prompts(roberta: Path, movies: Path) -> None:
    words = ["task=sst2", f"model.path={roberta}", "data=files", f"data.dir={movies}"]
    said = mezo("data", *words)
    assert said.code == 0, said
    assert [line.split() for line in said.out.splitlines()[:4]] == [
        ["rows", "per", "label", "negative", "positive"],
        ["train", "12", "12"],
        ["dev", "6", "6"],
        ["test", "6", "6"],
    ]
    for label, word in (("negative", "terrible"), ("positive", "great")):
        assert f"It was<mask>.</s>   [{label} -> '{word}'; " in said.out
    plain = mezo("data", "objective=cls", *words)
    assert plain.code == 0, plain
    assert "<mask>" not in plain.out
    assert "   [negative; " in plain.out


def test_the_few_shot_files(movies: Path, tmp_path: Path) -> None:
    assert mezo("data", "data=files", f"data.dir={movies}", "data.shots=3", "--export", "out").code == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert sorted(row["label"] for row in rows) == ["negative"] * 3 + ["positive"] * 3


def test_data_shows_prompts_and_answers(sums: list[object]) -> None:
    said = mezo("data", *sums)
    assert said.code == 0, said
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
