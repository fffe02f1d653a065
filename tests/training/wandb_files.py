"""Read what W&B keeps offline: run-ID.wandb is a log of protobuf records in LevelDB's format."""

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.command_line import HANGS

BLOCK, HEADER = 32768, struct.Struct("<IHB")
MAGIC = b":W&B\xe1\xbe\x00"


@dataclass
class OfflineRun:
    """A W&B run as its files have it."""

    id: str = ""
    project: str = ""
    name: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, float]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)  # in order, repeated ones too
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def read_offline_runs(folder: Path) -> list[OfflineRun]:
    """Return the finished runs under RUN/wandb in the order in which they began; a resumed run has two."""
    files = sorted(folder.glob("offline-run-*/run-*.wandb"))  # the time of the start is in the folder's name
    return [_read_finished(path) for path in files]


def _read_finished(path: Path) -> OfflineRun:
    """Return a run as soon as it has its exit code: W&B's own process may write after `finish` has returned."""
    deadline = time.monotonic() + HANGS
    while (run := read_offline_run(path)).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return run


def read_offline_run(path: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    found = OfflineRun()
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.id, found.project, found.name = record.run.run_id, record.run.project, record.run.display_name
            found.tags = list(record.run.tags)
            found.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.pop("_step", None)
            step = record.history.step.num if step is None else step
            found.steps.append(step)
            found.history[step] = {key: value for key, value in row.items() if not key.startswith("_")}
        elif kind == "summary":
            for item in record.summary.update:
                found.summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _records(content: bytes) -> list[bytes]:
    """Return the records of a log: each is one chunk (type 1), or a first, middle and last one (2, 3, 4)."""
    assert content[: len(MAGIC)] == MAGIC[: len(content)]
    records, parts, at = [], b"", len(MAGIC)
    while at + HEADER.size <= len(content):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(content, at)
        if at + HEADER.size + length > len(content):
            break  # still being written
        parts += content[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if kind in (1, 4):
            records.append(parts)
            parts = b""
    return records
