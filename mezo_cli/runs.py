"""The run directory: config, status, metrics, trajectory, checkpoints, summary, log. Only this room writes there."""

import contextlib
import datetime
import hashlib
import json
import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from mezo_cli.errors import RunFailed, UserError

log = logging.getLogger("mezo")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the run's JSON files; a missing or damaged one is a `UserError` that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value


class Run:
    """One run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.start_file = path / "start.safetensors"  # what the base model does not hold: a fresh head

    # --- birth and status ---

    @classmethod
    def create(cls, path: Path, config_yaml: str, argv: list[str]) -> "Run":
        """Claim `path` for a new run; two runs started at once never get the same one.

        A directory whose run failed before its first step holds nothing worth keeping and may be used again.

        Raises:
            UserError: when the directory already holds a run.
        """
        run = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        if (path / "config.yaml").exists() and run._never_began():
            for name in ("config.yaml", "run.json", "train.log"):
                (path / name).unlink(missing_ok=True)
        try:
            with open(path / "config.yaml", "x", encoding="utf-8") as file:
                file.write(config_yaml)
        except FileExistsError as error:
            raise UserError(
                f"{path} already holds a run: go on with it by `mezo resume {path}`, or name another hydra.run.dir"
            ) from error
        run.update(
            status="running",
            argv=argv,
            pid=os.getpid(),
            host=socket.gethostname(),
            start=_now(),
            end=None,
            error=None,
            versions=versions(),
            git_commit=_git_commit(),
            config_sha256=hashlib.sha256(config_yaml.encode()).hexdigest(),
        )
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
        run._mend_swaps()
        return run

    def info(self) -> dict[str, Any]:
        """Return run.json."""
        return read_json(self.path / "run.json")

    def update(self, **fields: Any) -> None:
        """Merge fields into run.json."""
        path = self.path / "run.json"
        current = read_json(path) if path.exists() else {}
        write_whole(path, json.dumps({**current, **fields}, indent=2) + "\n")

    def status(self) -> str:
        """Return running, finished, failed or interrupted; a run whose process is gone counts as interrupted."""
        info = self.info()
        status = str(info.get("status"))
        if status == "running" and info.get("host") == socket.gethostname() and not _alive(info.get("pid")):
            return "interrupted"
        return status

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
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        try:
            with _sigterm_interrupts():
                yield
            self.update(status="finished", end=_now(), error=None)
        except KeyboardInterrupt:
            self.update(status="interrupted", end=_now(), error="interrupted")
            log.warning("interrupted; go on with: mezo resume %s", self.path)
            raise
        except (UserError, RunFailed) as error:
            self.update(status="failed", end=_now(), error=str(error))
            handler.emit(log.makeRecord(log.name, logging.ERROR, "", 0, str(error), (), None))
            raise
        except BaseException as error:
            self.update(status="failed", end=_now(), error=f"{type(error).__name__}: {error}")
            handler.emit(log.makeRecord(log.name, logging.ERROR, "", 0, "the run failed", (), sys.exc_info()))
            raise
        finally:
            log.removeHandler(handler)
            handler.close()

    # --- metrics, trajectory, summary ---

    def metric(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        line = json.dumps({"kind": kind, "step": step, **values}, allow_nan=False)
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the sound lines of metrics.jsonl; a torn last line is left out, any other damage is an error."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")
        found: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                found.append(json.loads(line))
            except ValueError as error:
                if number == len(lines):
                    break
                raise UserError(f"{path}:{number} is damaged: {error}") from error
        return found

    def evaluations(self, split: str) -> list[dict[str, Any]]:
        """Return the evaluations on a split, in order."""
        return [m for m in self.metrics() if m["kind"] == "eval" and m["split"] == split]

    def step_of(self, name: str, metric: str = "accuracy") -> int:
        """Return the step that `best` (highest dev score, the earlier on a tie) or `last` stands for."""
        evals = self.evaluations("dev")
        if not evals:
            raise UserError(f"{self.path}: no evaluation yet, so there is no {name} checkpoint")
        if name == "last":
            return int(evals[-1]["step"])
        return int(max(evals, key=lambda m: (m.get(metric, m["accuracy"]), -m["step"]))["step"])

    def cut_metrics(self, step: int) -> None:
        """Drop every line after `step`, so that a resumed run writes none twice."""
        kept = [json.dumps(m) for m in self.metrics() if m["step"] <= step]
        write_whole(self.path / "metrics.jsonl", "".join(f"{line}\n" for line in kept))

    def open_trajectory(self, keep: int = 0) -> BinaryIO:
        """Open trajectory.bin to append; `keep` bytes of it are sound and a torn tail behind them is cut."""
        path = self.path / "trajectory.bin"
        file = open(path, "r+b" if keep else "wb")  # noqa: SIM115 (the loop holds it for the length of the run)
        file.truncate(keep)
        file.seek(keep)
        return file

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json: only a finished run has one."""
        write_whole(self.path / "summary.json", json.dumps(values, indent=2, allow_nan=False) + "\n")

    def store_rows(self, split: str, lines: list[str]) -> None:
        """Keep rows that came from memory as data/SPLIT.jsonl, so that the run can be repeated."""
        folder = self.path / "data"
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"{split}.jsonl", "".join(f"{line}\n" for line in lines))

    # --- checkpoints ---

    def save(self, name: str, step: int, write: Callable[[Path], None]) -> None:
        """Write checkpoint `name` (best, last): whole or not at all, with a checksum of each file."""
        self.checkpoints.mkdir(exist_ok=True)
        new, final, old = self.checkpoints / f".{name}.new", self.checkpoints / name, self.checkpoints / f".{name}.old"
        shutil.rmtree(new, ignore_errors=True)
        write(new)
        sums = {path.name: file_sum(path) for path in sorted(new.iterdir()) if path.is_file()}
        write_whole(new / "mezo.json", json.dumps({"step": step, "sha256": sums}, indent=2) + "\n")
        if final.exists():
            os.rename(final, old)
        os.rename(new, final)
        shutil.rmtree(old, ignore_errors=True)

    def saved_step(self, name: str) -> int | None:
        """Return the step of checkpoint `name`, None when it was never written."""
        path = self.checkpoints / name / "mezo.json"
        return int(read_json(path)["step"]) if path.exists() else None

    def _mend_swaps(self) -> None:
        """Finish the swap of `save` where a crash cut it between its two renames."""
        for old in self.checkpoints.glob(".*.old"):
            final = self.checkpoints / old.name[1:-4]
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.rename(old, final)


def verify(folder: Path) -> None:
    """Check a checkpoint's files against the checksums stored with it.

    Raises:
        UserError: for the first file that is missing or differs.
    """
    for name, stored in read_json(folder / "mezo.json").get("sha256", {}).items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing from the checkpoint")
        if file_sum(path) != stored:
            raise UserError(f"{path} is damaged: it does not match its checksum in mezo.json")


def file_sum(path: Path) -> str:
    """Return a file's sha256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find(root: Path) -> list[Run]:
    """Return the runs under `root`, oldest first."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    paths = [p.parent for p in root.rglob("run.json") if (p.parent / "config.yaml").is_file()]
    runs = [Run(path) for path in paths]
    return sorted(runs, key=lambda run: (run.info().get("start") or "", str(run.path)))


def home_of(folder: Path) -> Path | None:
    """Return the run that a checkpoint folder lies in, None when it lies in none."""
    run = folder.resolve().parent.parent
    return run if folder.resolve().parent.name == "checkpoints" and (run / "config.yaml").is_file() else None


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: the caller's handlers stay
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def versions() -> dict[str, str]:
    """Return the versions that a run depends on."""
    found = {"python": platform.python_version()}
    for name in ("mezo-runner", "torch", "transformers", "datasets", "hydra-core", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _git_commit() -> str | None:
    """Return the commit of the checkout that the package runs from, None when it is installed otherwise."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(here), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
