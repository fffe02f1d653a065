"""Cut the power: replay a recorded training's file operations up to some moment, and drop what was not synced.

`Disk` is a file system that keeps its promises and no more. The content of a file is safe at its fsync, its name at
the fsync of the folder. Whether anything later survives is open, so several worlds are tried for each moment.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaign.cases import Job, Lab, Outcome, go_on
from tests.campaign.file_operations import Operation
from tests.campaign.server import ForkServer

KIND = "power cuts"
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


@dataclass
class File:
    """A file's bytes: all of them, and those that were there at its last fsync."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def survives(self, world: str, rng: random.Random) -> bytes:
        """Return the bytes after the power cut."""
        data, synced = bytes(self.data), self.synced
        if world == "all" or data == synced:
            return data
        if world == "none" or not data.startswith(synced):
            return synced
        kept = rng.randrange(len(synced), len(data))
        return data[:kept] if world == "torn" else data[:kept] + bytes(len(data) - kept)


@dataclass
class Folder:
    """A folder's entries: all of them, those of its last fsync, and the changes since, in order."""

    entries: "dict[str, File | Folder]" = field(default_factory=dict)
    synced: "dict[str, File | Folder]" = field(default_factory=dict)
    changes: "list[dict[str, File | Folder | None]]" = field(default_factory=list)

    def change(self, **names: "File | Folder | None") -> None:
        """Add, replace or (None) remove entries in one step."""
        self.changes.append(names)
        _apply(self.entries, names)

    def survives(self, world: str, rng: random.Random) -> "dict[str, File | Folder]":
        """Return the entries after the power cut."""
        kept = {"none": 0, "all": len(self.changes)}.get(world, rng.randint(0, len(self.changes)))
        found = dict(self.synced)
        for names in self.changes[:kept]:
            _apply(found, names)
        return found


def _apply(entries: dict[str, "File | Folder"], names: dict[str, "File | Folder | None"]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """The run directory on a disk; the directory's own name is safe."""

    def __init__(self) -> None:
        self.root = Folder()

    def do(self, operation: Operation) -> None:
        """Do one recorded operation."""
        kind, path, argument = operation
        if not path:
            if kind == "fsync":
                _sync(self.root)
            return
        *folders, name = path.split("/")
        folder = self._folder(folders)
        if kind == "create":
            folder.change(**{name: File()})
        elif kind == "mkdir":
            folder.change(**{name: Folder()})
        elif kind in ("unlink", "rmdir"):
            folder.change(**{name: None})
        elif kind == "rename":
            *others, new = argument.split("/")
            node = folder.entries[name]
            if self._folder(others) is folder:
                folder.change(**{name: None, new: node})
            else:
                self._folder(others).change(**{new: node})
                folder.change(**{name: None})
        else:
            self._change(folder.entries[name], kind, argument)

    def _change(self, node: File | Folder, kind: str, argument: object) -> None:
        if kind == "fsync":
            _sync(node)
            return
        assert isinstance(node, File)
        if kind == "truncate":
            assert isinstance(argument, int)
            node.data = node.data[:argument].ljust(argument, b"\0")
        else:
            assert isinstance(argument, tuple)
            offset, data = argument
            node.data[offset : offset + len(data)] = data

    def _folder(self, names: Sequence[str]) -> Folder:
        found = self.root
        for name in names:
            node = found.entries[name]
            assert isinstance(node, Folder)
            found = node
        return found

    def cut(self, to: Path, world: tuple[str, str], rng: random.Random) -> None:
        """Write what survives into the folder `to`."""
        _write(self.root, to, world, rng)


def _sync(node: File | Folder) -> None:
    if isinstance(node, File):
        node.synced = bytes(node.data)
    else:
        node.synced, node.changes = dict(node.entries), []


def _write(folder: Folder, to: Path, world: tuple[str, str], rng: random.Random) -> None:
    to.mkdir()
    for name, node in folder.survives(world[0], rng).items():
        if isinstance(node, Folder):
            _write(node, to / name, world, rng)
        else:
            (to / name).write_bytes(node.survives(world[1], rng))


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
            for line in argument[1].splitlines():
                row = json.loads(line)
                if row["kind"] == "eval" and row["split"] == "dev":
                    waiting = row["step"]
    return found


def moments(log: Sequence[Operation], rng: random.Random, count: int) -> list[int]:
    """Return `count` numbers of operations after which the power is cut: half of them beside an fsync."""
    beside = [i for i, (kind, _, _) in enumerate(log) if kind == "fsync"]
    beside += [i + 1 for i in beside]
    chosen = [rng.choice(beside) for _ in range(count // 2)] if beside else []
    return chosen + [rng.randrange(1, len(log) + 1) for _ in range(count - len(chosen))]


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` power cuts, each in one of the worlds."""
    rng = random.Random(f"{KIND} {seed}")
    cases = sorted(lab.log)
    at = {case: moments(lab.log[case], rng, count) for case in cases}
    return [
        _cut(lab, cases[i % len(cases)], at[cases[i % len(cases)]][i], WORLDS[i // len(cases) % len(WORLDS)], i + seed)
        for i in range(count)
    ]


def _cut(lab: Lab, case: str, moment: int, world: tuple[str, str], seed: int) -> Job:
    def job(server: ForkServer, folder: Path) -> Outcome:
        disk, log = Disk(), lab.log[case][:moment]
        for operation in log:
            disk.do(operation)
        run = folder / "run"
        disk.cut(run, world, random.Random(seed))
        wrong, ends = go_on(lab, case, run, server)
        step = promised(log)
        if not wrong and step is not None:
            resumed = re.search(r"resumed at step (\d+)", ends[1].out + ends[1].err)
            finished = "is finished" in ends[1].out
            if not finished and (resumed is None or int(resumed[1]) < step):
                wrong = f"the evaluation of step {step} was lost: {resumed[0] if resumed else 'began anew'}"
        last = f"{log[-1][0]} {log[-1][1]}".strip()
        name = f"{case}: power cut after operation {moment} ({last}); unsynced names: {world[0]}, bytes: {world[1]}"
        return Outcome(KIND, name, not wrong, wrong or "bitwise identical")

    return job
