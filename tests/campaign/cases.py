"""The runs that the campaigns damage: tiny models, six steps, three evaluations; and what of two runs must agree."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import tiny
from tests.campaign import file_operations
from tests.campaign.commands import run as run_commands
from tests.campaign.file_operations import Operation
from tests.command_line import Result, small

CASES = {
    "mezo": [],
    "trajectory": ["checkpoint=trajectory", "objective=cls"],
    "adamw": ["optimizer=adamw", "optimizer.lr=1e-3"],
    "every_step": ["checkpoint_every=1", "eval_every=2", "log_every=1", "optimizer.samples=2"],
    "adam": ["optimizer=mezo_adam", "optimizer.lr=1e-3", "checkpoint=trajectory", "peft=bias"],
    "lora": ["peft=lora"],
    "probe": ["init=linear_probe", "steps=3"],
    "linear_probe": ["optimizer=linear_probe", "steps=0"],
}
SMALL = ("mezo", "adamw")  # what the ordinary suite damages
TIMES = {"seconds", "peak_memory_bytes", "crc"}
NOT_COMPARED = {"run.json", "train.log", "lock", ".lock", "run.lock"}

# Damages a run in a folder of its own, which is removed afterwards; returns what it did, and what is wrong, or "".
Job = Callable[[Path], tuple[str, str]]


@dataclass
class Lab:
    """A model, data, and for each case a finished run, an interrupted one, and the finished one's file operations."""

    folder: Path
    count: dict[str, int]
    log: dict[str, list[Operation]]
    bits: dict[str, dict[str, str]]

    def finished(self, case: str) -> Path:
        return self.folder / case / "finished"

    def interrupted(self, case: str) -> Path:
        """Return the run of a case that Ctrl-C ended after three fifths of its file operations."""
        return self.folder / case / "interrupted"

    def train(self, case: str, run: Path) -> list[str]:
        return ["train", *small(self.folder / "model", self.folder / "data", run, *CASES[case])]


def build(folder: Path, names: tuple[str, ...]) -> Lab:
    """Make the model, the data and the runs of the named cases."""
    tiny.roberta(folder / "model", hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    tiny.movie_folder(folder / "data")
    lab = Lab(folder, {}, {}, {})
    for name in names:
        (folder / name).mkdir()
        run, log = lab.finished(name), folder / f"{name}.log"
        watch: dict[str, Any] = {"root": str(run), "record_to": str(log)}
        (done,) = run_commands(lab.train(name, run), cwd=folder, watch=watch)
        assert done.code == 0, done
        lab.count[name], lab.log[name] = file_operations.load(log)
        lab.bits[name] = bits(run)
        run = lab.interrupted(name)
        watch = {"root": str(run), "signal_at": lab.count[name] * 3 // 5}
        (done,) = run_commands(lab.train(name, run), cwd=folder, watch=watch)
        assert done.code == 130, done
    return lab


def bits(run: Path) -> dict[str, str]:
    """Return what of a run, or of a folder with `run`, must not depend on a stop: every file, times left out."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        own = name.removeprefix("run/")
        if path.is_file() and own not in NOT_COMPARED:
            data = path.read_bytes().replace(str(path.parent).encode(), b"FOLDER")  # a model card names its folder
            found[name] = _facts(path) if own in ("metrics.jsonl", "summary.json") else _digest(data)
    return found


def only_times_differ(path: Path, other: Path) -> bool:
    """Whether two files of metrics are JSON that differs in times alone."""
    return path.name in ("metrics.jsonl", "summary.json") and _facts(path) == _facts(other)


def _facts(path: Path) -> str:
    data = path.read_bytes()
    try:
        rows = [json.loads(line) for line in (data.splitlines() if path.suffix == ".jsonl" else [data])]
    except ValueError:
        return _digest(data)
    kept = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
    return _digest(json.dumps(kept).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def differing(found: dict[str, str], expected: dict[str, str]) -> str:
    """Name the files in which two runs differ, "" when there are none."""
    names = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    named = ", ".join(f"{name}{'' if name in expected else ' (left over)'}" for name in names)
    return f"not bitwise identical: {named}" if named else ""


def complaint(result: Result, allowed: tuple[int, ...] = (0,)) -> str:
    """Return what is wrong with how a command ended, "" when nothing is: its status, or more than one line."""
    said = result.out + result.err
    if "Traceback" in said or "Logging error" in said:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        return f"traceback, status {result.code}: {last[:160]}"
    if result.code not in allowed:
        return f"status {result.code}: {result.err.strip()[-200:]}"
    if result.code > 0 and not (result.err.startswith("error: ") and result.err.count("\n") == 1):
        return f"status {result.code}, not one line: {result.err.strip()[-200:]!r}"
    return ""


def go_on(lab: Lab, case: str, run: Path) -> tuple[str, Result]:
    """Resume a run, or train again where its directory is free; return what is wrong with it, and how resume ended."""
    listed, ended = run_commands(["runs", str(run.parent)], ["resume", str(run)], cwd=run.parent)
    wrong = complaint(listed) or (complaint(ended) if ended.code != 2 else "")
    if ended.code == 2 and not wrong:
        wrong = complaint(run_commands(lab.train(case, run), cwd=run.parent)[0])
        wrong = f"neither resume ({ended.err.strip()[-150:]}) nor train ({wrong})" if wrong else ""
    return wrong or differing(bits(run), lab.bits[case]) or leftovers(run), ended


def leftovers(folder: Path) -> str:
    """Name what a command that was killed has left in a folder, "" when there is nothing."""
    left = [str(path.relative_to(folder)) for path in folder.rglob(".*") if path.name != ".lock"]
    return f"left behind: {', '.join(sorted(left))}" if left else ""
