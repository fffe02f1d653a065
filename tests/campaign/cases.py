"""The runs that the campaigns damage: tiny models, six steps, three evaluations; and what of two runs must agree."""

import hashlib
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import tiny
from tests.campaign import file_operations
from tests.campaign.file_operations import Operation
from tests.campaign.server import ForkServer
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


@dataclass(frozen=True)
class Outcome:
    """How one case of a campaign ended; `what` says how it failed, or in which way it passed."""

    kind: str
    case: str
    passed: bool
    what: str


Job = Callable[[ForkServer, Path], Outcome]  # the folder is the job's own, empty, and removed afterwards


@dataclass
class Lab:
    """A model, data, and for each case a finished run, an interrupted one, and the finished one's file operations."""

    folder: Path
    count: dict[str, int]
    log: dict[str, list[Operation]]
    bits: dict[str, dict[str, str]]

    def finished(self, case: str) -> Path:
        """Return the finished run of a case."""
        return self.folder / case / "finished"

    def interrupted(self, case: str) -> Path:
        """Return the run of a case that Ctrl-C ended after three fifths of its file operations."""
        return self.folder / case / "interrupted"

    def train(self, case: str, run: Path) -> list[str]:
        """Return the command that makes a run of a case."""
        return train(self.folder, case, run)


def train(folder: Path, case: str, run: Path) -> list[str]:
    """Return the command that makes a run with the model and data in `folder`."""
    return ["train", *small(folder / "model", folder / "data", run, *CASES[case])]


def build(server: ForkServer, folder: Path, names: tuple[str, ...]) -> Lab:
    """Make the model, the data and the runs of the named cases."""
    tiny.roberta(folder / "model", hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    tiny.movie_folder(folder / "data")
    lab = Lab(folder, {}, {}, {})
    for name in names:
        (folder / name).mkdir()
        run, log = lab.finished(name), folder / f"{name}.log"
        watch: dict[str, Any] = {"root": str(run), "record_to": str(log)}
        (done,) = server.run(lab.train(name, run), cwd=folder, watch=watch)
        assert done.code == 0, done
        lab.count[name], lab.log[name] = file_operations.load(log)
        lab.bits[name] = bits(run)
        run = lab.interrupted(name)
        watch = {"root": str(run), "signal_at": lab.count[name] * 3 // 5, "signum": signal.SIGINT}
        (done,) = server.run(lab.train(name, run), cwd=folder, watch=watch)
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
    return ", ".join(f"{name}{'' if name in expected else ' (left over)'}" for name in names)


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


def go_on(lab: Lab, case: str, run: Path, server: ForkServer) -> tuple[str, list[Result]]:
    """Resume a run, or train again where its directory is free; return what is wrong with the result, and the ends."""
    listed, ended = server.run(["runs", str(run.parent)], ["resume", str(run)], cwd=run.parent)
    ends = [listed, ended]
    wrong = complaint(listed)
    if wrong:
        return f"runs: {wrong}", ends
    if ended.code == 2:
        ends += server.run(lab.train(case, run), cwd=run.parent)
        wrong = complaint(ends[-1])
        if wrong:
            return f"neither resume ({ended.err.strip()[-150:]}) nor train ({wrong})", ends
    elif complaint(ended):
        return f"resume: {complaint(ended)}", ends
    other = differing(bits(run), lab.bits[case])
    return f"not bitwise identical: {other}" if other else leftovers(run), ends


def leftovers(folder: Path) -> str:
    """Name what a command that was killed has left in a folder, "" when there is nothing."""
    left = [str(path.relative_to(folder)) for path in folder.rglob(".*") if path.name != ".lock"]
    return f"left behind: {', '.join(sorted(left))}" if left else ""


def copy(run: Path, to: Path) -> Path:
    """Copy a run, with the times of its files."""
    shutil.copytree(run, to)
    return to
