"""JSON with checksums: an object in a file of its own, and lines that are appended to a log.

The field `crc` of an object is the crc32 of its other fields, `seconds` excepted: a resumed run writes the same lines
at another speed. In a log each crc is seeded with the one before it, so that a lost line shows too. A crash can damage
lines at the end of a log that were not synced yet: `read_valid` and `cut` are for the process that resumes the run.
"""

import collections
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError
from mezo_cli.runs.atomic import name_in_errors, no_link, read_json, sync, write_atomically

METRICS = "metrics.jsonl"
NO_CRC = "00000000"  # before the first line of a log

# --- objects ---


def write_object(path: Path, values: Mapping[str, Any], indent: int | None = 2) -> None:
    """Write a file with an object and its checksum, in one step."""
    write_atomically(path, json.dumps(add_checksum(values), indent=indent, allow_nan=False) + "\n")


def read_object(path: Path, hint: str = "") -> dict[str, Any]:
    """Return the object of `write_object`; `hint`: what to do if it is damaged."""
    return check_object(path, read_json(path), hint)


def check_object(path: Path, values: Mapping[str, Any], hint: str = "") -> dict[str, Any]:
    """Return an object that was read from a file without its checksum, which it has to match."""
    if add_checksum(values) != values:
        raise UserError(f"{path} is damaged: it does not match its own checksum{hint}")
    return {key: value for key, value in values.items() if key != "crc"}


def add_checksum(values: Mapping[str, Any], before: str = NO_CRC) -> dict[str, Any]:
    """Return the values with their `crc`; `before` is the crc of the previous line of a log.

    Raises:
        ValueError: for a number that is not finite, which JSON cannot represent.
    """
    kept = {key: value for key, value in values.items() if key not in ("seconds", "crc")}
    crc = zlib.crc32(json.dumps(kept, allow_nan=False).encode(), int(before, 16))
    return {**values, "crc": f"{crc:08x}"}


# --- logs ---


class DamagedError(UserError):
    """A line of a log is damaged; `is_inside`: sound ones follow, so that no crash has done it."""

    def __init__(self, text: str, is_inside: bool) -> None:
        super().__init__(text)
        self.is_inside = is_inside


class JsonLines:
    """A log: one process appends to it, any may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_crc: str | None = None  # of the last line; None until the whole file was read
        self._synced = True  # whether what this object appended is on the disk

    def append(self, record_kind: str, step: int, **values: Any) -> None:
        """Append one line; ValueError for a number that is not finite."""
        line = add_checksum({"kind": record_kind, "step": step, **values}, self.last_checksum())
        is_new = not self.path.exists()
        with name_in_errors(self.path), open(self.path, "ab", opener=no_link) as file:
            file.write(json.dumps(line).encode() + b"\n")
        if is_new:
            sync(self.path.parent)
        self._last_crc, self._synced = line["crc"], False

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        if not self._synced:
            sync(self.path)
            self._synced = True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the lines one by one, without an incomplete last one; `DamagedError` at the first that is."""
        crc, rows = NO_CRC, self._rows()
        for number, raw in enumerate(rows, 1):
            try:
                line = json.loads(raw)
                is_sound = isinstance(line, dict) and add_checksum(line, crc) == line
            except (ValueError, RecursionError):
                is_sound = False
            if not is_sound:
                text = f"{self.path}:{number} is damaged: it, or a line before it, was changed"
                raise DamagedError(text, any(map(_looks_valid, rows)))
            crc = line["crc"]
            yield line
        self._last_crc = crc

    def read_valid(self) -> tuple[list[dict[str, Any]], str | None]:
        """Return the lines before damage at the end, and what is wrong there: a power cut can leave that.

        An incomplete last line is left out without a word. Damage with a sound line behind it is refused.
        """
        lines = []
        try:
            for line in self:
                lines.append(line)
        except DamagedError as error:
            if error.is_inside:
                raise
            return lines, str(error)
        return lines, None

    def last_checksum(self) -> str:
        """Return the `crc` of the last line."""
        if self._last_crc is None:
            collections.deque(self, maxlen=0)
        return self._last_crc or NO_CRC

    def cut(self, count: int) -> None:
        """Keep the first `count` lines: a resumed run writes the others again. Damage before the end is refused."""
        kept = itertools.islice(self._rows(), min(count, len(self.read_valid()[0])))
        write_atomically(self.path, b"".join(raw + b"\n" for raw in kept))
        self._last_crc = None

    def _rows(self) -> Iterator[bytes]:
        """Yield the lines without an incomplete last one, as they are stored."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            for raw in file:
                if raw[-1:] == b"\n":
                    yield raw[:-1]
                # A crash leaves a part of a line, and zeros after a power cut. A whole line and one byte more is
                # something else: its line feed was changed.
                elif raw[-2:-1] == b"}" and raw[-1:] != b"\0" and _looks_valid(raw[:-1]):
                    yield raw


def _looks_valid(raw: bytes) -> bool:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and {"kind", "step", "crc"} <= set(line)
