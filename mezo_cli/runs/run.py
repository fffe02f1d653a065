"""The run directory: config, status, metrics, trajectory, checkpoints, summary, log. Only this room writes there."""

import contextlib
import datetime
import fcntl
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mezo_cli import machine
from mezo_cli.errors import RunFailed, UserError, did_you_mean
from mezo_cli.runs import checkpoints, sealed
from mezo_cli.runs.journal import Journal
from mezo_cli.signals import sigterm_interrupts

log = logging.getLogger("mezo")

STATUSES = ("running", "finished", "failed", "interrupted")


class Run:
    """One run directory. While it is trained in, this process holds a lock on its train.log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.trajectory = path / "trajectory.bin"
        self.start_file = path / "start.safetensors"  # what the base model does not hold: a fresh head
        self._lock: BinaryIO | None = None
        self._journal = Journal(path / "metrics.jsonl")

    # --- birth and status ---

    @classmethod
    def create(cls, path: Path, config_yaml: str, argv: list[str]) -> "Run":
        """Claim `path` for a new run; two runs started at once never get the same one.

        A directory whose run failed before its first step holds nothing worth keeping and may be used again.

        Raises:
            UserError: when the directory already holds a run, or cannot be made.
        """
        run, born = cls(path), _born(config_yaml, argv)
        taken = UserError(
            f"{path} already holds a run: go on with it by `mezo resume {path}`, or name another hydra.run.dir"
        )
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not run._take_lock():
                raise taken
            if (path / "config.yaml").exists() and run._never_began():
                for name in ("config.yaml", "run.json"):
                    (path / name).unlink(missing_ok=True)
                os.truncate(path / "train.log", 0)
            with open(path / "config.yaml", "x", encoding="utf-8") as file:
                file.write(config_yaml)
            sealed.write_whole(path / "run.json", json.dumps(born, indent=2) + "\n")
        except FileExistsError as error:
            run._drop_lock()
            raise taken from error
        except OSError as error:
            run._drop_lock()
            raise UserError(f"{path}: the run directory cannot be written: {error.strerror}") from error
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open an existing run; check that its config is the one it was started with.

        Raises:
            UserError: when there is no run, or its config was damaged or edited since.
        """
        run = cls(path)
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path} holds no run: there is no config.yaml (`mezo runs` lists the runs)")
        stored = run.info().get("config_sha256")
        if stored != hashlib.sha256((path / "config.yaml").read_bytes()).hexdigest():
            raise UserError(f"{path / 'config.yaml'} is damaged or was edited: it does not match run.json")
        if run.status() != "running":
            checkpoints.mend(run.checkpoints)
        return run

    def claim(self) -> None:
        """Take an interrupted run over, to go on with it.

        Raises:
            UserError: when another process is at work on it.
        """
        if self.status() == "running" or not self._take_lock():
            info = self.info()
            raise UserError(f"{self.path} is running (process {info.get('pid')} on {info.get('host')})")
        self.update(status="running", pid=os.getpid(), host=socket.gethostname(), end=None, error=None)

    def info(self) -> dict[str, Any]:
        """Return run.json."""
        return sealed.read_json(self.path / "run.json")

    def update(self, **fields: Any) -> None:
        """Merge fields into run.json."""
        sealed.write_whole(self.path / "run.json", json.dumps({**self.info(), **fields}, indent=2) + "\n")

    def status(self) -> str:
        """Return running, finished, failed or interrupted; a run whose process is gone counts as interrupted."""
        info = self.info()
        status = info.get("status")
        if status not in STATUSES:
            raise UserError(f"{self.path / 'run.json'} is damaged: its status is {status}")
        if status != "running":
            return str(status)
        held = self._held()
        if held is None:  # a file system without locks
            held = info.get("host") != socket.gethostname() or _alive(info.get("pid"))
        return "running" if held else "interrupted"

    def _never_began(self) -> bool:
        """Whether the run here failed before training: nothing in it is worth keeping."""
        if any((self.path / name).exists() for name in ("metrics.jsonl", "trajectory.bin", "checkpoints")):
            return False
        try:
            return self.info().get("status") == "failed"
        except UserError:
            return False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep run.json's status right whatever ends the block, and the log in train.log. SIGTERM counts as Ctrl-C."""
        handler = logging.FileHandler(self.path / "train.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        log.addHandler(handler)
        try:
            with sigterm_interrupts():
                yield
            self.update(status="finished", end=_now(), error=None)
        except KeyboardInterrupt:
            self._end("interrupted", "interrupted")
            log.warning("interrupted; go on with: mezo resume %s", self.path)
            raise
        except (UserError, RunFailed) as error:
            self._end("failed", str(error))
            handler.emit(log.makeRecord(log.name, logging.ERROR, "", 0, str(error), (), None))
            raise
        except BaseException as error:
            self._end("failed", f"{type(error).__name__}: {error}")
            handler.emit(log.makeRecord(log.name, logging.ERROR, "", 0, "the run failed", (), sys.exc_info()))
            if isinstance(error, OSError):  # a full disk, a folder that went away
                raise RunFailed(f"{self.path}: {error}") from error
            raise
        finally:
            log.removeHandler(handler)
            handler.close()
            self._drop_lock()

    def _end(self, status: str, error: str) -> None:
        try:
            self.update(status=status, end=_now(), error=error)
        except (OSError, UserError) as failed:  # what ended the run is told, not this
            log.error("run.json could not be written: %s", failed)

    def _take_lock(self) -> bool:
        """Lock the run for this process, until it dies at the latest; False when another holds it."""
        lock = open(self.path / "train.log", "ab")  # noqa: SIM115 (held for the length of the run)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        except OSError:  # a file system without locks: config.yaml still keeps runs apart
            pass
        self._lock = lock
        return True

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _held(self) -> bool | None:
        """Whether a process holds the run's lock; None when that cannot be known."""
        try:
            with open(self.path / "train.log", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError) as error:
            return isinstance(error, BlockingIOError)
        except OSError:
            return None
        return False

    # --- metrics, trajectory, summary ---

    def metric(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        self._journal.append(kind, step, **values)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; a torn last one is left out, any other damage is a `UserError`."""
        return self._journal.read()

    def evaluations(self, split: str) -> list[dict[str, Any]]:
        """Return the evaluations on a split, in order."""
        return [m for m in self.metrics() if m["kind"] == "eval" and m["split"] == split]

    def cut_metrics(self, step: int) -> None:
        """Drop every line after `step`, and those of the end, so that a resumed run writes none twice."""
        self._journal.cut(step)

    def open_trajectory(self, keep: int = 0) -> BinaryIO:
        """Open trajectory.bin to append; `keep` bytes of it are sound and a torn tail behind them is cut."""
        file = open(self.trajectory, "r+b" if keep else "wb")  # noqa: SIM115 (the loop holds it for the run)
        file.truncate(keep)
        file.seek(keep)
        return file

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json, sealed: only a finished run has one."""
        text = json.dumps(sealed.seal(values), indent=2, allow_nan=False)
        sealed.write_whole(self.path / "summary.json", text + "\n")

    def results(self) -> dict[str, Any]:
        """Return summary.json.

        Raises:
            UserError: when there is none, or it was changed.
        """
        values = sealed.read_json(self.path / "summary.json")
        if "crc" in values and sealed.check(values) is None:  # a run of before the seal has none
            raise UserError(f"{self.path / 'summary.json'} is damaged: it does not match its own checksum")
        return {key: value for key, value in values.items() if key != "crc"}

    def store_rows(self, split: str, lines: list[str]) -> None:
        """Keep rows that came from memory as data/SPLIT.jsonl, so that the run can be repeated."""
        folder = self.path / "data"
        folder.mkdir(exist_ok=True)
        sealed.write_whole(folder / f"{split}.jsonl", "".join(f"{line}\n" for line in lines))

    # --- checkpoints ---

    def save(self, name: str, step: int, write: Callable[[Path], None]) -> None:
        """Let `write` fill checkpoint `name` (best, last) with the weights of `step`."""
        checkpoints.save(self.checkpoints, name, step, write)

    def saved_step(self, name: str) -> int | None:
        """Return the step of checkpoint `name`, None when there is none."""
        return checkpoints.step_of(self.checkpoints, name)


def find(root: Path) -> list[Run]:
    """Return the runs under `root`, oldest first; damaged ones come before all others.

    Raises:
        UserError: when there is no such folder.
    """
    if not root.is_dir():
        beside = [path.name for path in root.parent.iterdir() if path.is_dir()] if root.parent.is_dir() else []
        raise UserError(f"{root}: no such folder{did_you_mean(root.name, beside)}")
    paths = {found.parent for name in ("run.json", "trajectory.bin") for found in root.rglob(name)}
    return sorted((Run(path) for path in paths), key=lambda run: (_start(run), str(run.path)))


def _start(run: Run) -> str:
    try:
        return str(run.info().get("start") or "")
    except UserError:
        return ""


def _born(config_yaml: str, argv: list[str]) -> dict[str, Any]:
    return {
        "status": "running",
        "argv": argv,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "start": _now(),
        "end": None,
        "error": None,
        "versions": machine.versions(),
        "git_commit": machine.git_commit(),
        "config_sha256": hashlib.sha256(config_yaml.encode()).hexdigest(),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True
