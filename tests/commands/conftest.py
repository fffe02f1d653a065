"""A finished run for all tests of commands on a run, and a task of prompts."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import finished_runs


@pytest.fixture(scope="package")
def run(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps, to be read only; its data are in the folder `movies` beside it."""
    folder = tmp_path_factory.mktemp("commands")
    return finished_runs(folder, roberta, tiny.movie_folder(folder / "movies"), {"run": ["eval_batch_size=5"]}) / "run"


@pytest.fixture
def sums(tmp_path: Path) -> list[object]:
    """A task without labels, its rows with lists and records, and a decoder: the words of a command line."""
    task = tmp_path / "conf" / "task" / "sums.yaml"
    task.parent.mkdir(parents=True)
    task.write_text(
        "name: sums\ngenerate:\n  prompt: 'Add {numbers}: {question|strip}\\nAnswer:'\n"
        "  answer: ' {answers.text[0]}\\n'\n  gold: answers.text\n  stop: ['\\n']\n"
    )
    rows = [
        {"question": f"{i} + 1? ", "numbers": [i, 1], "answers": {"text": [str(i + 1), "?"]}, "id": i}
        for i in range(20)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    model = tiny.decoder(tmp_path / "model")
    words = ["task=sums", "objective=generate", "objective.loss=lm", f"model.path={model}", "data=files"]
    return [*words, f"data.dir={tmp_path / 'rows.jsonl'}", "--config-dir", tmp_path / "conf"]
