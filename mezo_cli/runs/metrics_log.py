"""`metrics.jsonl`: one JSON object per line, with chained checksums (checksums.py); compressed in what is shared.

The best step of a run is read from it, so a changed or lost line has to show. A crash can damage lines at the end
that were not synced yet; `read_valid` and `cut` are for the process that resumes the run.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError
from mezo_cli.runs.checksums import add_checksum, verify_checksum, verify_line
from mezo_cli.runs.files import name_in_errors, open_own, read_bytes, sync, write_atomically

SMALL = 1 << 20  # bytes of the longest line of a compressed log, and of the log of a run without steps
METRICS = "metrics.jsonl"
MOST = 1e300  # of a number: sums of larger ones are infinite
NUMBER = (int, float)
FIELDS: dict[str, Any] = {"kind": str, "split": str, "loss": NUMBER, "seconds": NUMBER, "predicted": dict}  # of a line


class MetricsLog:
    """A metrics.jsonl file: one process appends to it, any may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_crc: int | None = None  # of the last line; None until the file was read
        self._synced = True  # whether what this object appended is on the disk

    def append(self, record_kind: str, step: int, **values: Any) -> None:
        """Append one line.

        Raises:
            ValueError: for a number that is not finite.
        """
        if self._last_crc is None:
            self.read()
        line = add_checksum({"kind": record_kind, "step": step, **values}, self._last_crc or 0)
        is_new = not self.path.exists()
        with name_in_errors(self.path), open_own(self.path, "ab") as file:
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
        """Return the lines without an incomplete last one."""
        lines, problem = self._read()
        if problem is not None:
            raise UserError(problem)
        return [line for line, _ in lines]

    def read_valid(self) -> tuple[list[dict[str, Any]], str | None]:
        """Return the lines before damage at the end, and what is wrong there: a power cut can leave that.

        An incomplete last line is left out without a word.
        """
        lines, problem = self._read(refuse_in_middle=True)
        return [line for line, _ in lines], problem

    def last_checksum(self) -> str:
        """Return the `crc` of the last line."""
        if self._last_crc is None:
            self.read()
        return f"{self._last_crc or 0:08x}"

    def cut(self, count: int) -> None:
        """Keep the first `count` lines: a resumed run writes the others again. Damage before the end is refused."""
        kept = self._read(refuse_in_middle=True)[0][:count]
        write_atomically(self.path, "".join(f"{raw}\n" for _, raw in kept))
        self._last_crc = None

    def _read(self, refuse_in_middle: bool = False) -> tuple[list[tuple[dict[str, Any], str]], str | None]:
        """Return the lines before the first damaged one, each also as text, and what is wrong with that one."""
        self._last_crc = 0
        lines: list[tuple[dict[str, Any], str]] = []
        rows = enumerate(_rows(self.path), 1)
        for number, raw in rows:
            line, crc, problem = None, None, ""
            try:
                line = json.loads(raw)
                crc = verify_line(raw, self._last_crc) or verify_checksum(line, self._last_crc)
                if crc is None:
                    problem = "it, or a line before it, was changed"
                elif self.path.name == METRICS:
                    problem = _odd_value(line)
            except (ValueError, RecursionError) as error:
                problem = str(error)
            if problem:
                text = f"{self.path}:{number} is damaged: {problem}"
                if refuse_in_middle and any(_looks_valid(later) for _, later in rows):
                    raise UserError(text)
                return lines, text
            assert line is not None
            assert crc is not None
            lines.append((line, raw.decode()))
            self._last_crc = crc
        return lines, None


def chained(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a file of such lines that is written at once."""
    lines, crc = [], 0
    for row in rows:
        line = add_checksum(dict(row), crc)
        crc = int(line["crc"], 16)
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def compressed(path: Path) -> Path:
    """Return the name of a log's compressed form, which is read where the log itself is not there."""
    return path.with_name(f"{path.name}.gz")


def compress(path: Path, into: Path) -> None:
    """Write the compressed form of a log in the folder `into`; equal logs give equal bytes."""
    content = b"".join(raw + b"\n" for raw in _rows(path))
    write_atomically(compressed(into / path.name), gzip.compress(content, mtime=0))


def _rows(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log without an incomplete last one; a shared run has the compressed form alone."""
    packed = compressed(path)
    if path.exists() or not packed.exists():
        *rows, tail = (read_bytes(path) if path.exists() else b"").split(b"\n")
        yield from [*rows, tail] if _lost_its_end(tail) else rows
        return
    steps = path.with_name("trajectory.bin")  # a record has 8 bytes or more, so this is 8 KB or more per step
    left = SMALL + 1024 * (steps.stat().st_size if steps.exists() else 0)
    try:
        with open_own(packed) as file, gzip.open(file) as lines:
            while raw := lines.readline(min(SMALL, left) + 1):
                left -= len(raw)
                if raw[-1:] != b"\n" or left < 0:
                    raise UserError(f"{packed} is damaged: it holds more than a run of its steps, or half a line")
                yield raw[:-1]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{packed} is damaged: {error}") from error


def _odd_value(line: dict[str, Any]) -> str:
    """Return what a line of metrics.jsonl holds that no run writes, "" if nothing: it is somebody else's then."""
    if type(line.get("step")) is not int or line["step"] < 0:
        return f"its step is {line.get('step')!r:.40}"
    for name, value in line.items():
        is_odd = not isinstance(value, FIELDS.get(name, object))
        is_odd = is_odd or (isinstance(value, NUMBER) and not -MOST <= value <= MOST)
        if is_odd:
            return f"its {name} is {value!r:.40}"
    return ""


def _lost_its_end(tail: bytes) -> bool:
    """Return whether what follows the last line feed is a whole line and one more byte: its line feed was changed.

    A crash leaves a part of a line there; zeros behind it, after a power cut.
    """
    return tail[-2:-1] == b"}" and tail[-1:] != b"\0" and _looks_valid(tail[:-1])


def _looks_valid(raw: bytes) -> bool:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and {"kind", "step", "crc"} <= set(line)


def metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics and the loss among the fields of an evaluation, as metrics.jsonl or summary.json has them."""
    others = ("step", "seconds", "rows", "row", "drift", "keep_log_prob", "keep_kl")
    return {
        name: float(value)
        for name, value in values.items()
        if name not in others and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
