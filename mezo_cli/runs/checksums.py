"""Checksums inside JSON objects: a changed object no longer matches its own `crc` field.

`crc` is the crc32 of the object's other fields, `seconds` excepted: a resumed run writes the same lines at another
speed. In a chain each crc is seeded with the one before it, so that a lost line shows too.
"""

import json
import zlib
from typing import Any


def add_checksum(values: dict[str, Any], before: int = 0) -> dict[str, Any]:
    """Return the values with their `crc`; `before` is the crc of the previous object of a chain.

    Raises:
        ValueError: for a number that is not finite, which JSON cannot represent.
    """
    return {**values, "crc": f"{_crc(values, before):08x}"}


def verify_checksum(values: Any, before: int = 0) -> int | None:
    """Return the crc of an object; None if the object does not match it."""
    if not isinstance(values, dict):
        return None
    crc = _crc({key: value for key, value in values.items() if key != "crc"}, before)
    return crc if values.get("crc") == f"{crc:08x}" else None


def verify_line(raw: bytes, before: int = 0) -> int | None:
    """Return the crc of an object as `json.dumps` wrote it, its `seconds` and `crc` last; None for any other text.

    Several times as fast as `verify_checksum`, which an object needs where this returns None: nothing is written again.
    """
    body, _, end = raw.rpartition(b', "crc": "')
    kept, key, seconds = body.rpartition(b', "seconds": ')
    is_number = key and not seconds.strip(b"0123456789.e+-")
    crc = zlib.crc32(b"}", zlib.crc32(kept if is_number else body, before))
    return crc if end == b'%08x"}' % crc else None


def _crc(values: dict[str, Any], before: int) -> int:
    kept = {key: value for key, value in values.items() if key != "seconds"}
    return zlib.crc32(json.dumps(kept, allow_nan=False).encode(), before)
