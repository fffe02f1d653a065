"""`metrics.jsonl`: one sealed JSON object a line, each chained to the one before (see sealed.py).

The best step of a run is read from here, so a changed or lost line must never pass for another run's.
"""

import json
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError
from mezo_cli.runs import sealed


class Journal:
    """A metrics.jsonl, written by one process and read by any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: int | None = None  # crc of the last line, once known

    def append(self, kind: str, step: int, **values: Any) -> None:
        """Add one line. A number that is not finite is a `ValueError`."""
        if self._last is None:
            self._lines()
        line = sealed.seal({"kind": kind, "step": step, **values}, self._last or 0)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._last = int(line["crc"], 16)

    def read(self) -> list[dict[str, Any]]:
        """Return the lines; a torn last one is left out.

        Raises:
            UserError: for any other damage, with the line's number.
        """
        return [line for line, _ in self._lines()]

    def cut(self, step: int) -> None:
        """Drop every line after `step`, and those of the end (train, test), so that a resumed run writes none twice."""
        kept = []
        for line, raw in self._lines():
            if line["step"] > step or line.get("split") in ("train", "test"):
                break
            kept.append(raw)
        sealed.write_whole(self.path, "".join(f"{line}\n" for line in kept))
        self._last = None

    def _lines(self) -> list[tuple[dict[str, Any], str]]:
        """Return the sound lines, read and as they stand."""
        self._last = 0
        if not self.path.exists():
            return []
        found = []
        for number, raw in enumerate(self.path.read_bytes().split(b"\n")[:-1], 1):
            try:
                line = json.loads(raw)
                crc = sealed.check(line, self._last)
            except ValueError as error:
                raise UserError(f"{self.path}:{number} is damaged: {error}") from error
            if crc is None:
                raise UserError(f"{self.path}:{number} is damaged: it, or a line before it, was changed")
            found.append((line, raw.decode()))
            self._last = crc
        return found
