"""Files of a run directory that are whole or absent, and JSON that shows when it was changed.

A sealed object carries `crc`: the crc32 of its other fields but `seconds` (a resumed run gives the same lines at
another speed). A chain of them, each seeded with the one before, also shows a line that was lost.
"""

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; a missing or damaged one is a `UserError` that names it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


def seal(values: dict[str, Any], before: int = 0) -> dict[str, Any]:
    """Return the values with their `crc`; `before` is that of the object before it in a chain.

    Raises:
        ValueError: for a number that is not finite: JSON has none.
    """
    return {**values, "crc": f"{_crc(values, before):08x}"}


def check(values: Any, before: int = 0) -> int | None:
    """Return the crc of a sealed object, None when it does not hold."""
    if not isinstance(values, dict):
        return None
    crc = _crc({key: value for key, value in values.items() if key != "crc"}, before)
    return crc if values.get("crc") == f"{crc:08x}" else None


def _crc(values: dict[str, Any], before: int) -> int:
    kept = {key: value for key, value in values.items() if key != "seconds"}
    return zlib.crc32(json.dumps(kept, allow_nan=False).encode(), before)
