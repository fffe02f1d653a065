"""Cut the power: replay a recorded training's file operations up to some moment, and drop what was not synced.

`Folder` is a file system that keeps its promises and no more. The content of a file is safe at its fsync, its name at
the fsync of the folder. Whether anything later survives is open, so several worlds are tried for each moment.
"""

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign.cases import Job, Lab, go_on
from tests.campaign.file_operations import Operation

# (what survives of names that were not synced, what survives of bytes that were not)
WORLDS = [
    ("none", "none"),
    ("all", "none"),
    ("all", "torn"),
    ("all", "zeros"),
    ("some", "none"),
    ("some", "torn"),
    ("none", "all"),
    ("all", "all"),
]


class File:
    """A file's bytes: all of them, and those that were there at its last fsync."""

    def __init__(self) -> None:
        self.data, self.synced = b"", b""

    def sync(self) -> None:
        self.synced = self.data

    def cut(self, to: Path, world: tuple[str, str], rng: random.Random) -> None:
        """Write the bytes that survive."""
        kept = self.synced
        if world[1] == "all":
            kept = self.data
        elif world[1] != "none" and self.data.startswith(self.synced) and self.data != self.synced:
            kept = self.data[: rng.randrange(len(self.synced), len(self.data))]
            kept = kept if world[1] == "torn" else kept.ljust(len(self.data), b"\0")
        to.write_bytes(kept)


class Folder:
    """A folder's entries: all of them, those of its last fsync, and the changes since, in order. None: removed."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.synced: dict[str, Any] = {}
        self.changes: list[dict[str, Any]] = []

    def change(self, names: dict[str, Any]) -> None:
        """Add, replace or (None) remove entries in one step."""
        self.changes.append(names)
        self.entries.update(names)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.entries), []

    def cut(self, to: Path, world: tuple[str, str], rng: random.Random) -> None:
        """Write what survives of this folder, which is the run directory or below it."""
        kept = {"none": 0, "all": len(self.changes)}.get(world[0], rng.randint(0, len(self.changes)))
        found = dict(self.synced)
        for names in self.changes[:kept]:
            found.update(names)
        to.mkdir()
        for name, node in found.items():
            if node is not None:
                node.cut(to / name, world, rng)

    def locate(self, path: str) -> tuple["Folder", str]:
        """Return the folder of a path, and the name in it."""
        first, slash, rest = path.partition("/")
        return self.entries[first].locate(rest) if slash else (self, first)

    def do(self, operation: Operation) -> None:
        """Do one recorded operation below this folder, whose own name is safe."""
        kind, path, argument = operation
        folder, name = self.locate(path)
        node = folder.entries.get(name) if path else self
        if kind == "fsync":
            node.sync()
        elif not path:
            return
        elif kind in ("create", "mkdir"):
            folder.change({name: File() if kind == "create" else Folder()})
        elif kind in ("unlink", "rmdir"):
            folder.change({name: None})
        elif kind == "rename":
            other, new = self.locate(argument)
            if other is not folder:
                other.change({new: node})
            folder.change({name: None, **({new: node} if other is folder else {})})
        elif kind == "truncate":
            node.data = node.data[:argument].ljust(argument, b"\0")
        else:
            offset, data = argument
            node.data = node.data[:offset].ljust(offset, b"\0") + data + node.data[offset + len(data) :]


def disk_after(log: Sequence[Operation]) -> Folder:
    """Return the run directory as recorded operations leave it."""
    disk = Folder()
    for operation in log:
        disk.do(operation)
    return disk


def promised(log: Sequence[Operation]) -> int | None:
    """Return the step of the last evaluation that the operations promise, None when there is none.

    An evaluation is promised once its line is in metrics.jsonl and the run has gone on to write something else there,
    in trajectory.bin or in checkpoints/: by then it must be synced, with the trajectory and the checkpoints before it.
    """
    found: int | None = None
    waiting: int | None = None
    for kind, path, argument in log:
        goes_on = path in ("trajectory.bin", "metrics.jsonl") or path.startswith("checkpoints/")
        if kind in ("write", "create", "mkdir", "rename") and goes_on and waiting is not None:
            found, waiting = waiting, None
        if kind == "write" and path == "metrics.jsonl":
            for row in map(json.loads, argument[1].splitlines()):
                waiting = row["step"] if (row["kind"], row.get("split")) == ("eval", "dev") else waiting
    return found


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` power cuts, each in one of the worlds: half of them beside an fsync."""
    rng = random.Random(f"power cuts {seed}")
    cases = sorted(lab.log)
    made: list[Job] = []
    for number in range(count):
        case, world = cases[number % len(cases)], WORLDS[number // len(cases) % len(WORLDS)]
        log = lab.log[case]
        syncs = [i for i, (kind, _, _) in enumerate(log) if kind == "fsync"]
        beside = rng.choice(syncs) + rng.randrange(2)
        moment = beside if rng.random() < 0.5 else rng.randrange(1, len(log) + 1)
        made.append(partial(_cut, lab, case, max(1, moment), world, number + seed))
    return made


def _cut(lab: Lab, case: str, moment: int, world: tuple[str, str], seed: int, folder: Path) -> tuple[str, str]:
    log, run = lab.log[case][:moment], folder / "run"
    disk_after(log).cut(run, world, random.Random(seed))
    wrong, ended = go_on(lab, case, run)
    step = promised(log)
    if not wrong and step is not None and "is finished" not in ended.out:
        resumed = re.search(r"resumed at step (\d+)", ended.out + ended.err)
        if resumed is None or int(resumed[1]) < step:
            wrong = f"the evaluation of step {step} was lost: {resumed[0] if resumed else 'began anew'}"
    last = f"{log[-1][0]} {log[-1][1]}".strip()
    name = f"{case}: power cut after operation {moment} ({last}); unsynced names: {world[0]}, bytes: {world[1]}"
    return name, wrong
