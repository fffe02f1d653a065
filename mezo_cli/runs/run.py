"""The run directory: create, open, claim, record the status; read and write its files. Only `runs` writes there."""

import contextlib
import datetime
import fcntl
import hashlib
import itertools
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from mezo_cli.config.stored import read_config
from mezo_cli.console import LogFormatter, log, relative_path
from mezo_cli.errors import RunFailed, RunStopped, UserError, did_you_mean, without_credentials
from mezo_cli.process import versions
from mezo_cli.process.environment import IN_SWEEP
from mezo_cli.process.signals import termination_as_keyboard_interrupt
from mezo_cli.runs import atomic, checkpoints, trajectory
from mezo_cli.runs.atomic import no_link, remove, sync, write_atomically, write_error
from mezo_cli.runs.contents import Contents, RunInfo, Summary, check_types
from mezo_cli.runs.jsonl import METRICS, NO_CRC, JsonLines, add_checksum, check_object, read_object, write_object

SWEEP, STUDY = "sweep.json", "study.journal"  # in the folder of a sweep's runs, of a search's trials
FORMAT = 1  # of the run directory; begins with version 1.0.0 of the package
BEFORE_TRAINING = ("probe", "race")  # in run.json: what took `forwards` of a batch before the first step
ALWAYS_READ = ("summary.json", METRICS, "trajectory.bin")  # of a finished run, by every command about it
ENDS = (  # the files whose ends run.json has
    *(*ALWAYS_READ, "predictions.jsonl", "untrained.json", "last_dev.json"),
    *(f"checkpoints/{name}/{checkpoints.CHECKSUMS}" for name in checkpoints.NAMES),
)
ENDED = ("train", "test")  # splits that are evaluated at the end of a run
TAKES_REWARD = ("resume", "eval")  # a function of the user's own is not stored: these commands take it again


class Run:
    """A run directory. The process that trains in it holds a lock on its .lock file.

    What is written whole (run.json, checkpoints, ...) is on the disk when the method returns. Lines of metrics.jsonl
    are after `lines.sync`; those of a long run fill the memory if they are not read one by one.
    """

    writes = True  # whether this process writes there; not one that follows another (`ReadOnlyRun`)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.pruned_checkpoints = path / atomic.TEMPORARY.format("checkpoints")  # their name while they are removed
        self.trajectory = path / "trajectory.bin"
        self.initial_state_file = path / "start.safetensors"  # what the base model lacks: a new head, an adapter
        self.lines, self._completions = JsonLines(path / METRICS), JsonLines(path / "completions.jsonl")
        self._lock: FileLock | None = None  # while this object holds it
        self._files_before: set[str] | None = None  # what else was in the directory when this object created the run
        self._new_folders: list[Path] = []  # made for it

    # --- create, open, claim ---

    @classmethod
    def create(cls, path: Path, config_yaml: str, argv: list[str]) -> "Run":
        """Claim a directory for a new run, and write run.json and config.yaml; of two processes one succeeds.

        A directory whose run failed before training may be used again. The status is interrupted until `tracked`
        changes it, so it is true if a signal comes in between.
        """
        cls.check_free(path)
        run, (commit, is_dirty) = cls(path), versions.git_state()
        run._new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            run._acquire()
            cls.check_free(path)
            for name in ("config.yaml", "run.json", "train.log"):  # of a run that never began
                (path / name).unlink(missing_ok=True)
            run._files_before = set(os.listdir(path)) - {".lock"}
            info = {
                "format": FORMAT,
                "status": "interrupted",
                "argv": [without_credentials(word) for word in argv],
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "start": utc_now(),
                "end": None,
                "error": None,
                "versions": versions.installed(),
                "git_commit": commit,
                "git_dirty": is_dirty,
                "config_sha256": hashlib.sha256(config_yaml.encode()).hexdigest(),
            }
            write_object(path / "run.json", info)
            write_atomically(path / "config.yaml", config_yaml)  # the last: without it, the directory is free
            sync(path.parent)
        except BaseException as error:
            run._discard()
            if isinstance(error, OSError):
                raise write_error(path, error) from error
            raise
        return run

    @classmethod
    def check_free(cls, path: Path) -> None:
        """Check that `create` may use a directory: it holds no run, or one that ended before training began."""
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: the run directory cannot be written: this is a file")
        has_begun = any((path / name).exists() for name in (METRICS, "trajectory.bin", "checkpoints"))
        if (path / "config.yaml").exists() and (has_begun or cls(path).info()["status"] != "failed"):
            how = f"continue it by `mezo resume {path}`, or name another hydra.run.dir"
            raise UserError(f"{path} already holds a run: {how}")

    def _discard(self) -> None:
        """Remove what this object has created: the directory is as it was before."""
        with contextlib.suppress(OSError):
            made = () if self._files_before is None else set(os.listdir(self.path)) - self._files_before
            for name in sorted(made):  # config.yaml before run.json: see `check_free`
                remove(self.path / name)
        self._release()
        with contextlib.suppress(OSError):
            for folder in self._new_folders:
                folder.rmdir()

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open an existing run, and check that its config.yaml is unchanged."""
        run = cls(path)
        if not (path / "config.yaml").is_file():
            why = " is a sweep: name one of its runs" if is_sweep(path) else " holds no run: there is no config.yaml"
            if not path.is_dir():
                listed = Path("outputs") / path  # the list of runs gives paths below it
                shown = f" (did you mean '{listed}'?)" if listed.is_dir() else ""
                why = f": no such run directory{shown or did_you_mean(path.name, _folders(path.parent))}"
            raise UserError(f"{path}{why} (`mezo runs` lists the runs)")
        if run.status(run.read()[0]) != "running":
            checkpoints.repair(run.checkpoints)
        return run

    def read(self) -> tuple[dict[str, Any], str]:
        """Return run.json and the text of config.yaml, each read once. Unlike `open`, nothing is repaired."""
        info, path = self.info(), self.path / "config.yaml"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        # The checksum of the last change is taken, too: config.yaml and run.json cannot be replaced at once.
        stored = [info.get("config_sha256"), *(change["config_sha256"] for change in (info.get("changes") or [])[-1:])]
        if hashlib.sha256(content).hexdigest() not in stored:
            raise UserError(f"{path} is damaged or was edited: it does not match run.json")
        return info, content.decode(errors="replace")

    def contents(self) -> Contents:
        """Read what the run says, each file once. A finished run lacks none of its files, and they are no other run's.

        They are its own: run.json, written last, has a checksum of the size and the end of each (`ends`).
        """
        info, text = self.read()
        config, status = read_config(self.path / "config.yaml", text), self.status(info)
        if status != "finished":
            return Contents(info, config, status, {})
        summary, (recorded, rest) = self.read_summary(), trajectory.length(self.trajectory)
        if config.optimizer.replayable and (recorded, rest) != (summary["steps"], 0):
            more = f" and {rest} bytes more" if rest else ""
            held = f"it holds {recorded} of the run's {summary['steps']} steps{more}"
            raise UserError(f"{self.trajectory} is damaged: {held}")
        self.check_ends(info)
        return Contents(info, config, status, summary)

    def claim(self, finished: bool = False) -> None:
        """Lock an interrupted run for this process, to resume it; its status stays until `tracked` changes it.

        Args:
            finished: whether the run was finished when the caller decided to resume it; another may have done so since.
        """
        if self._is_exported():
            raise UserError(f"{self.path} was exported with --trajectory: it is read, never resumed")
        try:
            self._acquire()
            if not finished and self.status() == "finished":
                self._release()
                raise UserError(f"{self.path} was just finished by another process: there is nothing to resume")
            self.update(pid=os.getpid(), host=socket.gethostname())
        except OSError as error:
            self._release()
            raise write_error(self.path, error) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in the run inside the block; its status stays as it is."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        """Lock the directory, and remove what a process that was killed left there; UserError if another has it."""
        try:
            self._lock = atomic.lock_file(self.path / ".lock", seconds=0.2)  # a reader holds it for microseconds
        except BlockingIOError as error:
            info = self.info() if (self.path / "run.json").exists() else {}
            raise UserError(f"{self.path} is running (process {info.get('pid')} on {info.get('host')})") from error
        try:
            for folder in (self.path, self.path / "data", self.checkpoints):
                for left in folder.glob(atomic.TEMPORARY.format("*")):
                    remove(left)
            checkpoints.repair(self.checkpoints)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- run.json ---

    def info(self) -> dict[str, Any]:
        """Return run.json without its checksum. A format that is not known is refused."""
        path = self.path / "run.json"
        if not path.exists() and (self.path / "config.yaml").exists():
            why = "a config.yaml without run.json is no run, or the rest of one: remove it, or name another directory"
            raise UserError(f"{path}: no such file: {why}")
        values = atomic.read_json(path)
        if values.get("format") != FORMAT:
            found = f"of a format that this one does not know: {values.get('format')}"
            raise UserError(f"{self.path}: of a version of mezo before 1.0, or {found}")
        return check_types(RunInfo, path, check_object(path, values))

    def update(self, **fields: Any) -> None:
        """Set fields of run.json."""
        write_object(self.path / "run.json", {**self.info(), **fields})

    def status(self, info: dict[str, Any] | None = None) -> str:
        """Return the status; a run whose process is gone is interrupted. `info`: run.json, if it was read."""
        status = (self.info() if info is None else info)["status"]
        if status != "running":
            return str(status)
        try:  # the process that trains in it holds the lock; readers share it
            with open(self.path / ".lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running"
        except OSError:
            pass
        return "interrupted"

    def _is_exported(self) -> bool:
        """Return whether `mezo export --trajectory` wrote the directory, which leaves out what is about its machine."""
        return "argv" not in self.info()

    def ends(self, names: Iterable[str] = ENDS) -> dict[str, str]:
        """Return file -> checksum of its size and end, of those files that are there."""
        return {name: end for name in names if (end := atomic.end_checksum(self.path / name)) is not None}

    def check_ends(self, info: Mapping[str, Any], names: Iterable[str] = ALWAYS_READ) -> None:
        """Refuse files of a finished run that are not those that it ended with, by its run.json."""
        ends: Mapping[str, str] = info.get("ends") or {} if info["status"] == "finished" else {}
        for name in (name for name in names if name in ends):
            path = self.path / name
            if atomic.end_checksum(path) != ends[name]:
                read = {METRICS: self.metrics, self.trajectory.name: self.read_trajectory}.get(name)
                if path.exists() and read is not None:
                    read()  # names the line or the record that is damaged
                raise UserError(f"{path} is damaged: it is not what run.json says that this run has written")

    def command(self, verb: str, *words: str, info: Mapping[str, Any] | None = None) -> str:
        """Return `mezo VERB RUN WORDS`, with the reward that the run needs to be given again, to be run from here."""
        reward = own_reward(self.info() if info is None else info) if verb in TAKES_REWARD else []
        return shlex.join(["mezo", verb, relative_path(self.path), *words, *reward])

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Record in run.json that the run is running, then how the block ended, and write the log to train.log.

        SIGTERM and SIGHUP are as Ctrl-C. The caller has created or claimed the run. A mistake of the user before the
        first step removes a run that was created, unless it is a sweep's job, which keeps its error.

        Raises:
            RunFailed: in place of an `OSError` (a full disk, a folder that was removed).
        """
        handler = _LogFile(self.path / "train.log")
        log.addHandler(handler)
        try:
            with termination_as_keyboard_interrupt():
                last = dict.fromkeys({"verdict"} & self.info().keys())  # of its last end
                self.update(status="running", end=None, error=None, stopped=None, **last)
                yield
            self.update(status="finished", end=utc_now(), error=None, ends=self.ends())  # of files that are synced
        except (KeyboardInterrupt, RunStopped) as stop:
            reason = str(stop) if isinstance(stop, RunStopped) else "interrupted"
            self._record_end("interrupted", reason)
            is_told = isinstance(stop, KeyboardInterrupt) and IN_SWEEP in os.environ
            log.warning("%s", reason if is_told else f"{reason}; resume with: {self.command('resume')}")
            raise
        except BaseException as error:
            if isinstance(error, UserError) and self._may_go():
                self._discard()
                raise
            is_known = isinstance(error, (UserError, RunFailed))
            text = str(error) if is_known else f"{type(error).__name__}: {error}"
            self._record_end("failed", text)
            message, trace = (text, None) if is_known else ("the run failed", sys.exc_info())
            handler.emit(log.makeRecord(log.name, logging.ERROR, "", 0, message, (), trace))
            if isinstance(error, OSError):
                raise RunFailed(f"{self.path}: {error}") from error
            raise
        finally:
            log.removeHandler(handler)
            handler.close()
            self._release()

    def _may_go(self) -> bool:
        """Whether this object has created the run, no step was taken, and no sweep tells its error."""
        if self._files_before is None or IN_SWEEP in os.environ or is_sweep(self.path.parent):
            return False
        lines = self.lines.read_valid()[0]
        return trajectory.length(self.trajectory)[0] == 0 and not any(line["step"] for line in lines)

    def _record_end(self, status: str, error: str) -> None:
        try:
            self.update(status=status, end=utc_now(), error=without_credentials(error))
        except (OSError, UserError) as failed:  # the first error is the one to report
            log.error("run.json could not be written: %s", failed)

    # --- logs ---

    def log_metrics(self, record_kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl. An evaluation on dev has the checksum of the completions so far."""
        if values.get("split") == "dev" and self._completions.path.exists():
            values = {"completions_crc": self._completions.last_checksum(), **values}
        self.lines.append(record_kind, step, **values)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl without an incomplete last one."""
        return list(self.lines)

    def evaluations(self, split: str) -> list[dict[str, Any]]:
        """Return the evaluations on a split, in order."""
        return [line for line in self.lines if line["kind"] == "eval" and line["split"] == split]

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines after `step` and those of the end of the run, so that a resumed run writes none twice."""
        lines = self.lines.read_valid()[0]
        kept = list(itertools.takewhile(lambda one: one["step"] <= step and one.get("split") not in ENDED, lines))
        completions = self._named_completions(kept)
        self.lines.cut(len(kept))
        if self._completions.path.exists():
            self._completions.cut(len(completions))

    def log_completions(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append to completions.jsonl what the model said of the first dev rows at an evaluation."""
        for row, record in enumerate(records):
            self._completions.append("completion", step, row=row, **record)
        self._completions.sync()

    def completions(self) -> dict[int, list[dict[str, Any]]]:
        """Return step -> what the model said of the first dev rows then, in their order; {} for a run without."""
        by_step: dict[int, list[dict[str, Any]]] = {}
        for line in self._named_completions(self.lines.read_valid()[0], is_all=self.status() == "finished"):
            by_step.setdefault(line["step"], []).append(line)
        return by_step

    def _named_completions(self, lines: Sequence[Mapping[str, Any]], is_all: bool = False) -> list[dict[str, Any]]:
        """Return the lines of completions.jsonl up to the last evaluation in `lines`, which names it.

        What follows is of an evaluation that was interrupted; `is_all`: nothing may.
        """
        path, named = self._completions.path, [one["completions_crc"] for one in lines if "completions_crc" in one]
        if not path.exists() and self._is_exported():  # it has no rows of the data
            return []
        found = self._completions.read_valid()[0] if named or is_all else []
        count = next((number for number, line in enumerate(found, 1) if named and line["crc"] == named[-1]), 0)
        if (named and not count) or (is_all and count < len(found)):
            raise UserError(f"{path} is damaged: it is not what metrics.jsonl says that this run has written")
        return found[:count]

    def open_trajectory(self, keep: int = 0) -> BinaryIO:
        """Open trajectory.bin to append after its first `keep` bytes; the rest is cut."""
        file = open(self.trajectory, "r+b" if keep else "wb", opener=no_link)  # noqa: SIM115  # the caller closes it
        file.truncate(keep)
        file.seek(keep)
        sync(self.path)
        return file

    def read_trajectory(self) -> trajectory.Trajectory:
        """Return the trajectory without a part of a record at its end, which every kill can leave.

        Whole records that fail their checksums are damage to a reader (`mezo resume` cuts them); a finished run has
        neither.
        """
        past = trajectory.read(self.trajectory)
        past.check_end(self.trajectory, is_finished=self.status() == "finished")
        return past

    # --- files that are written whole ---

    def save_initial_state(self, write: Callable[[Path], None]) -> None:
        """Save the initial weights that the base model does not have; `write` writes a file, if there are any."""
        try:
            atomic.replace(self.initial_state_file, write)
        except Exception as error:  # a full disk raises different errors in each library
            raise RunFailed(str(write_error(self.initial_state_file, error))) from error

    def write_summary(self, values: dict[str, Any]) -> None:
        """Write summary.json with a checksum. Only a finished run has one."""
        self.lines.sync()
        write_object(self.path / "summary.json", values)

    def read_summary(self) -> dict[str, Any]:
        """Return summary.json without its checksum."""
        path = self.path / "summary.json"
        return check_types(Summary, path, read_object(path))

    def write_predictions(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write predictions.jsonl, whole: for each test row, in order, its columns, label, predicted, probabilities."""
        lines, crc = [], NO_CRC
        for number, row in enumerate(rows):
            line = add_checksum({"row": number, **row}, crc)
            crc = line["crc"]
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_atomically(self.path / "predictions.jsonl", "".join(lines))

    def predictions(self) -> list[dict[str, Any]] | None:
        """Return the predictions for the test rows at the best checkpoint, in order.

        Each is `{"row", "columns", "label", "predicted", "probabilities"}`. None where there is no such file: the run
        has not finished, or has no test split.
        """
        path, info = self.path / "predictions.jsonl", self.info()
        self.check_ends(info, [path.name])
        if not path.is_file() or not (self.path / "summary.json").is_file():
            return None
        rows = [{key: value for key, value in line.items() if key != "crc"} for line in JsonLines(path)]
        if [row["row"] for row in rows] != list(range((info.get("rows") or {}).get("test") or 0)):
            raise UserError(f"{path} is damaged: it has not all of the test rows")
        return rows

    def save_rows(self, split: str, lines: str) -> None:
        """Save rows that came from memory as data/SPLIT.jsonl, so that the run can be repeated."""
        folder = self.path / "data"
        folder.mkdir(exist_ok=True)
        sync(self.path)
        write_atomically(folder / f"{split}.jsonl", lines)

    def save_checkpoint(self, name: str, step: int, write: Callable[[Path], None]) -> None:
        """Save checkpoint `name` (best, last) of `step`; `write` writes its files into a folder."""
        checkpoints.save(self.checkpoints, name, step, write)

    def checkpoint_step(self, name: str) -> int | None:
        """Return the step of checkpoint `name`; None if there is none."""
        folder = self.checkpoints / name
        return int(read_object(folder / checkpoints.CHECKSUMS, checkpoints.HINT)["step"]) if folder.is_dir() else None

    def remove_checkpoints(self, steps: Mapping[str, int]) -> int:
        """Remove all checkpoints, whose steps are given, and record it; return the bytes that this frees."""
        size = sum(path.stat().st_size for path in self.checkpoints.rglob("*") if path.is_file())
        self.update(pruned={"time": utc_now(), "bytes": size, "checkpoints": steps})
        os.rename(self.checkpoints, self.pruned_checkpoints)
        sync(self.path)
        remove(self.pruned_checkpoints)
        return size


class ReadOnlyRun(Run):
    """The run directory as ranks other than 0 see it: they read what rank 0 has written, and write nothing."""

    writes = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not (path / "config.yaml").is_file():
            raise UserError(
                f"{path}: this rank does not see the run directory; it must be on a disk that all hosts share"
            )

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Treat SIGTERM and SIGHUP as Ctrl-C inside the block."""
        with termination_as_keyboard_interrupt():
            yield

    def open_trajectory(self, keep: int = 0) -> BinaryIO:
        """Open a file that discards what is written."""
        return open(os.devnull, "r+b")

    def _write_nothing(self, *_: Any, **__: Any) -> None:
        """Write nothing, in place of what writes a file of the run."""

    update = log_metrics = log_completions = truncate_metrics = _write_nothing
    save_initial_state = save_checkpoint = write_summary = write_predictions = _write_nothing


class _LogFile(logging.Handler):
    """Append the log to a file, opened for each line. A line that cannot be written does not stop a run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(LogFormatter("%(asctime)s %(levelname)-7s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError), open(self._path, "ab", opener=no_link) as file:
            file.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))


def find_runs(root: Path) -> list[Run]:
    """Return the runs under `root`, oldest first. Those whose run.json cannot be read come first."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder{did_you_mean(root.name, _folders(root.parent))}")
    os.listdir(root)  # raises where it cannot be read, which os.walk takes for empty
    found = []
    for folder, folders, files in os.walk(root):
        if "run.json" in files or "trajectory.bin" in files:  # a run, which may be damaged: a config.yaml alone is none
            folders[:] = [name for name in folders if name != "checkpoints"]
            run, start = Run(Path(folder)), ""
            with contextlib.suppress(UserError):
                start = str(run.info().get("start") or "")
            found.append((start, folder, run))
    return [run for *_, run in sorted(found, key=lambda one: one[:2])]


def describe_run(path: Path) -> dict[str, Any]:
    """Return a run's directory, status, error and, once it is finished, summary. One that did not start is missing."""
    document: dict[str, Any] = {"run": str(path.absolute()), "status": "missing", "error": None, "summary": None}
    if not (path / "config.yaml").exists():
        return document
    try:
        found = Run(path).contents()
    except UserError as error:
        return {**document, "status": "damaged", "error": str(error)}
    return {**document, "status": found.status, "error": found.info.get("error"), "summary": found.summary or None}


def is_sweep(path: Path) -> bool:
    """Return whether a directory is that of a sweep or a search."""
    return (path / SWEEP).is_file() or (path / STUDY).is_file()


def _folders(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []


def utc_now() -> str:
    """Return the time as an ISO 8601 string, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def own_reward(info: Mapping[str, Any]) -> list[str]:
    """Return the override that gives a run its own reward again, by its run.json; empty where it has none."""
    if not info.get("own_reward"):
        return []
    reward = info.get("reward") or {"in_process": True}  # not recorded before the first step
    # A callable of Python is nothing that a command line can name.
    return [f"objective.reward={'FILE.py:FUNCTION' if reward['in_process'] else reward['name']}"]
