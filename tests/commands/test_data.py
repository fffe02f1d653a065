"""`mezo data`: class balance, lengths and prompts; the few-shot files."""

import json
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


def test_a_short_group_is_exported_with_a_warning(movies: Path, tmp_path: Path) -> None:
    said = mezo("data", "data=files", f"data.dir={movies}", "data.shots=13", "--export", tmp_path / "out")
    assert said.code == 0
    assert "warning: " in said.err
    assert "fewer than 13 rows" in said.err
