"""`metrics.jsonl`: one JSON object per line, with chained checksums (checksums.py).

The best step of a run is read from it, so a changed or lost line has to show. A crash can damage lines at the end
that were not synced yet; `read_prefix` and `truncate` are for the process that resumes the run.
"""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError
from mezo_cli.runs.checksums import add_checksum, verify_checksum
from mezo_cli.runs.files import name_in_errors, open_to_read, open_to_write, read_bytes, sync, write_atomically

TAIL_BYTES = 65536  # at the end of the file; the last two lines are in them
TRAIN_LINE = b'{"kind": "train", "step": '


class MetricsLog:
    """A metrics.jsonl file: one process appends to it, any may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_crc: int | None = None  # of the last line; None until the file was read
        self._synced = True  # whether what this object appended is on the disk

    def append(self, kind: str, step: int, **values: Any) -> None:
        """Append one line.

        Raises:
            ValueError: for a number that is not finite.
        """
        if self._last_crc is None:
            self.read()
        line = add_checksum({"kind": kind, "step": step, **values}, self._last_crc or 0)
        is_new = not self.path.exists()
        with name_in_errors(self.path), open_to_write(self.path, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
        if is_new:
            sync(self.path.parent)
        self._last_crc, self._synced = int(line["crc"], 16), False

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        if not self._synced:
            sync(self.path)
            self._synced = True

    def read(self) -> list[dict[str, Any]]:
        """Return the lines without an incomplete last one.

        Raises:
            UserError: for any other damage, with the line's number.
        """
        lines, problem, _ = self._read()
        if problem is not None:
            raise UserError(problem)
        return [line for line, _ in lines]

    def read_prefix(self) -> tuple[list[dict[str, Any]], str | None, bool]:
        """Return the lines before the first damaged one, what is wrong with that one, and whether it is in the middle.

        It is in the middle when a later line looks sound: no crash leaves that. An incomplete last line is left out
        without a word.
        """
        lines, problem, in_middle = self._read()
        return [line for line, _ in lines], problem, in_middle

    def read_last(self) -> dict[str, Any] | None:
        """Return the last line, None if there is none. Only the end of the file is read.

        Raises:
            UserError: when the line is damaged.
        """
        if not self.path.exists():
            return None
        with open_to_read(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            rows = _rows(file.read())
        if start and len(rows) < 3:  # the first one is not whole
            return self.read()[-1]
        return self._checked(rows, len(rows) - 1) if rows else None

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations, the last `train` line and the last line.

        The other lines are neither parsed nor checked. A line is checked against the checksum that the line before it
        states, so a changed one shows.

        Raises:
            UserError: when one of them is damaged.
        """
        rows = _rows(read_bytes(self.path)) if self.path.exists() else []
        is_train = [row.startswith(TRAIN_LINE) and b'"eval"' not in row for row in rows]
        last_train = max((number for number, is_one in enumerate(is_train) if is_one), default=-1)
        wanted = [n for n, is_one in enumerate(is_train) if not is_one or n in (last_train, len(rows) - 1)]
        return [self._checked(rows, number) for number in wanted]

    def _checked(self, rows: Sequence[bytes], number: int) -> dict[str, Any]:
        """Return a line that is checked against the checksum of the line before it."""
        before = re.search(rb'"crc": "([0-9a-f]{8})"\}$', rows[number - 1]) if number else None
        line = None
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(rows[number])
        if (number and before is None) or verify_checksum(line, int(before[1], 16) if before else 0) is None:
            start = rows[number][:40].decode(errors="replace")
            raise UserError(f"{self.path} is damaged: the line '{start}...', or the one before it, was changed")
        assert isinstance(line, dict)
        return line

    def truncate(self, step: int) -> None:
        """Drop damaged lines, those after `step`, and the final ones (train, test): a resumed run writes them again."""
        kept = []
        for line, raw in self._read()[0]:
            if line["step"] > step or line.get("split") in ("train", "test"):
                break
            kept.append(raw)
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))
        self._last_crc = None

    def _read(self) -> tuple[list[tuple[dict[str, Any], str]], str | None, bool]:
        """As `read_prefix`, with each line also as text."""
        self._last_crc = 0
        found: list[tuple[dict[str, Any], str]] = []
        rows = _rows(read_bytes(self.path)) if self.path.exists() else []
        for number, raw in enumerate(rows, 1):
            line, crc, problem = None, None, "it, or a line before it, was changed"
            try:
                line = json.loads(raw)
                crc = verify_checksum(line, self._last_crc)
            except (ValueError, RecursionError) as error:
                problem = str(error)
            if crc is None:
                in_middle = any(_looks_sound(later) for later in rows[number:])
                return found, f"{self.path}:{number} is damaged: {problem}", in_middle
            assert line is not None
            found.append((line, raw.decode()))
            self._last_crc = crc
        return found, None, False


def _rows(content: bytes) -> list[bytes]:
    """Return the lines of the file without an incomplete last one."""
    *rows, tail = content.split(b"\n")
    return [*rows, tail] if _lost_its_end(tail) else rows


def _lost_its_end(tail: bytes) -> bool:
    """Return whether what follows the last line feed is a whole line and one more byte: its line feed was changed.

    A crash leaves a part of a line there; zeros behind it, after a power cut.
    """
    return tail[-2:-1] == b"}" and tail[-1:] != b"\0" and _looks_sound(tail[:-1])


def _looks_sound(raw: bytes) -> bool:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and {"kind", "step", "crc"} <= set(line)
