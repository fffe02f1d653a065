"""`mezo data`: class balance, lengths and prompts; the few-shot files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import environment, mezo


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_data_shows_balance_lengths_and_prompts(roberta: Path, movies: Path) -> None:
    said = mezo("data", "task=sst2", f"model.path={roberta}", "data=files", f"data.dir={movies}")
    assert said.code == 0, said
    lines = said.out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["rows", "per", "label", "negative", "positive"],
        ["train", "12", "12"],
        ["dev", "6", "6"],
        ["test", "6", "6"],
    ]
    assert "It was<mask>.</s>   [negative -> 'terrible'; " in said.out
    assert "It was<mask>.</s>   [positive -> 'great'; " in said.out


def test_data_shows_plain_inputs_for_cls(roberta: Path, movies: Path) -> None:
    said = mezo("data", "objective=cls", f"model.path={roberta}", "data=files", f"data.dir={movies}")
    assert said.code == 0, said
    assert "<mask>" not in said.out
    assert "   [negative; " in said.out


def test_data_export_loads_no_tokenizer_and_no_model(movies: Path, here: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['mezo', 'data', 'data=files', 'data.dir={movies}', 'data.shots=3', '--export', 'out']\n"
        "from mezo_cli.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print('code', end.code)\n"
        "print('loaded', sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=environment(), capture_output=True, text=True)
    assert done.stdout.endswith("code 0\nloaded []\n"), done
    rows = [json.loads(line) for line in (here / "out" / "train.jsonl").read_text().splitlines()]
    assert sorted(row["label"] for row in rows) == ["negative"] * 3 + ["positive"] * 3


def test_a_short_group_is_exported_with_a_warning(movies: Path, here: Path) -> None:
    said = mezo("data", "data=files", f"data.dir={movies}", "data.shots=13", "--export", here / "out")
    assert said.code == 0
    assert "warning: " in said.err
    assert "fewer than 13 rows" in said.err
