"""predictions.jsonl: written whole, read back, and any damage is noticed and named."""

import json
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.errors import UserError
from mezo_cli.runs import Run

ROWS: list[dict[str, Any]] = [
    {
        "columns": {"sentence": f"schön \u2028 {number}"},
        "label": "bad",
        "predicted": ("bad", "good")[number % 2],
        "probabilities": {"bad": 0.1 + 0.2, "good": 1 / (number + 3)},
    }
    for number in range(4)
]
COUNTS = {"bad": 2, "good": 2, "never": 0}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    finished = Run(tmp_path)
    finished.write_predictions(ROWS)
    finished.log_metrics("eval", 1, split="test", predicted=COUNTS)
    finished.write_summary({"steps": 1})
    return finished


def complaint(run: Run, expected: list[dict[str, Any]]) -> str:
    """Return the error of reading the file; "" if what is read is as expected."""
    try:
        return "" if run.predictions() == expected else "other rows, silently"
    except UserError as error:
        return str(error)


def test_they_are_read_as_they_were_written(run: Run) -> None:
    assert run.predictions() == [{"row": number, **row} for number, row in enumerate(ROWS)]
    assert not list(run.path.glob("*.tmp"))


def test_any_flipped_byte_is_noticed_or_changes_nothing(run: Run) -> None:
    file, expected = run.path / "predictions.jsonl", run.predictions() or []
    data, noticed = file.read_bytes(), 0
    for offset in range(len(data)):
        file.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
        said = complaint(run, expected)
        assert said == "" or (said.startswith(str(file)) and " is damaged" in said)
        noticed += said != ""
    assert noticed > len(data) * 0.9  # a space beside a comma may become another one


def test_lost_lines_are_noticed(run: Run) -> None:
    file = run.path / "predictions.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for kept in (lines[:-1], lines[1:], [*lines[:1], *lines[2:]], [*lines, lines[-1]]):
        file.write_bytes(b"".join(kept))
        with pytest.raises(UserError, match=r"predictions\.jsonl.* is damaged"):
            run.predictions()


def test_a_run_without_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.predictions() is None
    run.write_predictions(ROWS)
    assert run.predictions() is None  # the run has not ended: another try may end elsewhere
    run.log_metrics("eval", 1, split="test", predicted=COUNTS)
    run.write_summary({"steps": 1})
    rows = run.predictions()
    assert rows is not None
    assert json.dumps(rows[3]["columns"]) == json.dumps(ROWS[3]["columns"])
