"""metrics.jsonl: what was appended is read, and nothing that was changed or lost passes for it."""

import json
from pathlib import Path

import pytest

from mezo_cli.errors import UserError
from mezo_cli.runs.jsonl import JsonLines


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A metrics log of five lines."""
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    for step, accuracy in ((0, 0.25), (5, 0.5), (10, 0.75), (15, 0.5)):
        log.append("eval", step, split="dev", accuracy=accuracy, seconds=step / 3)
    log.append("eval", 10, split="test", accuracy=0.7, seconds=9.0)
    return path


def test_what_is_appended_is_read(written: Path) -> None:
    lines = list(JsonLines(written))
    assert [line["step"] for line in lines] == [0, 5, 10, 15, 10]
    assert [json.loads(raw) for raw in written.read_text().splitlines()] == lines
    assert list(JsonLines(written.parent / "none.jsonl")) == []


@pytest.mark.parametrize("tail", [b'{"kind": "eval", "st', b"", b"\0", bytes(40)])
def test_what_a_crash_leaves_at_the_end_is_left_out(written: Path, tail: bytes) -> None:
    """A part of a line; the whole line without its line feed; after a power cut zeros in place of what is missing."""
    whole, lines = written.read_bytes(), list(JsonLines(written))
    written.write_bytes(whole + tail)
    assert list(JsonLines(written)) == lines
    written.write_bytes(whole[:-1] + tail[:1].strip(b"{"))
    assert list(JsonLines(written)) == lines[:-1]


@pytest.mark.parametrize("lost", range(4))
def test_a_lost_line_is_reported(written: Path, lost: int) -> None:
    lines = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
    with pytest.raises(UserError, match=rf"metrics\.jsonl:{lost + 1} is damaged"):
        list(JsonLines(written))


def test_an_incomplete_last_line_is_left_out_and_cut(written: Path) -> None:
    whole = written.read_bytes()
    written.write_bytes(whole[:-7])
    log = JsonLines(written)
    assert len(list(log)) == 4
    log.cut(3)
    assert written.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    log.append("train", 11, loss=1.0)
    assert [line["step"] for line in list(JsonLines(written))] == [0, 5, 10, 11]


def test_the_same_lines_at_another_speed_have_the_same_checksums(tmp_path: Path) -> None:
    made = []
    for speed in (1.0, 2.0):
        log = JsonLines(tmp_path / f"{speed}.jsonl")
        for step in range(3):
            log.append("train", step, loss=0.1 * step, seconds=step * speed)
        made.append([{k: v for k, v in line.items() if k != "seconds"} for line in list(log)])
    assert made[0] == made[1]
    assert "crc" in made[0][0]


def test_a_number_that_is_none_is_never_written(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        log.append("train", 1, loss=float("nan"))
    assert list(log) == []
