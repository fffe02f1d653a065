"""The run directory: create, open, claim, record the status; read and write its files. Only `runs` writes there."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from mezo_cli.errors import RunFailed, RunStopped, UserError, did_you_mean, without_credentials
from mezo_cli.runs import checkpoints, sweep_record, trajectory
from mezo_cli.runs.checksums import add_checksum, verify_checksum
from mezo_cli.runs.commands import run_command
from mezo_cli.runs.files import (
    TEMPORARY,
    lock_file,
    name_in_errors,
    open_own,
    read_bytes,
    read_json,
    remove,
    sync,
    write_atomically,
    write_error,
)
from mezo_cli.runs.log_file import LogFile
from mezo_cli.runs.metrics_log import MetricsLog, chained, compressed
from mezo_cli.runs.run_json import FORMAT, STATUSES, initial_run_json, may_be_alive, utc_now
from mezo_cli.system import IN_SWEEP, termination_as_keyboard_interrupt

log = logging.getLogger("mezo")


class Run:
    """A run directory. The process that trains in it holds a lock on its .lock file.

    What is written whole (run.json, checkpoints, ...) is on the disk when the method returns. Lines of metrics.jsonl
    are after `sync_metrics`.

    Attributes:
        path: the directory.
        checkpoints: the folder of the checkpoints `best` and `last`.
        trajectory: the trajectory file.
        initial_state_file: the initial weights that the base model does not have (a new head, an adapter).
        writes: whether this process writes there; not one that follows another (read_only.py).
    """

    writes = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.trajectory = path / "trajectory.bin"
        self.initial_state_file = path / "start.safetensors"
        self._lock: FileLock | None = None  # while this object holds it
        self._made: _Made | None = None  # of a run that this object has created
        self._metrics_log = MetricsLog(path / "metrics.jsonl")
        self._completions = MetricsLog(path / "completions.jsonl")

    # --- create, open, claim ---

    @classmethod
    def create(cls, path: Path, config_yaml: str, argv: list[str]) -> "Run":
        """Claim a directory for a new run, and write config.yaml and run.json.

        Of two processes that create the same run, one succeeds. A directory whose run failed before training may be
        used again. The status is interrupted until `tracked` changes it, so it is true if a signal comes in between.

        Raises:
            UserError: when the directory already holds a run, or cannot be written.
            RunFailed: when the disk is full.
        """
        run = cls(path)
        cls.check_free(path)
        made = _Made(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not run._acquire():
                raise run._taken()
            run._made = made
            run._write_first_files(config_yaml, initial_run_json(config_yaml, argv))
        except BaseException as error:
            run._discard() if run._made else made.remove_folders()
            if isinstance(error, OSError):
                raise write_error(path, error) from error
            raise
        return run

    @classmethod
    def check_free(cls, path: Path) -> None:
        """Check that `create` would find the directory free, without writing anything."""
        _check_name(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: the run directory cannot be written: this is a file")
        if not cls(path)._is_free():
            raise cls(path)._taken()

    def _taken(self) -> UserError:
        return UserError(
            f"{self.path} already holds a run: continue it by `mezo resume {self.path}`, or name another hydra.run.dir"
        )

    def _write_first_files(self, config_yaml: str, info: dict[str, Any]) -> None:
        """Write config.yaml and run.json in place of those of a run that never began."""
        config = self.path / "config.yaml"
        if not self._is_free():
            raise self._taken()
        for name in ("config.yaml", "run.json", "train.log"):
            (self.path / name).unlink(missing_ok=True)
        try:
            file = open(config, "x", encoding="utf-8")  # noqa: SIM115 (closed below)
        except FileExistsError as error:  # where there are no locks, this decides
            raise self._taken() from error
        with name_in_errors(config), file:
            file.write(config_yaml)
        sync(config)
        self._write_info(info)
        sync(self.path.parent)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open an existing run, and check that its config.yaml is unchanged."""
        run = cls(path)
        if not (path / "config.yaml").is_file():
            raise UserError(f"{_why_no_run(path)} (`mezo runs` lists the runs)")
        if not (path / "run.json").exists() and run._is_free():
            raise UserError(
                f"{path / 'run.json'}: no such file: the process ended before the run began, so there is nothing to "
                f"continue with; start it by `mezo train` with hydra.run.dir={path}"
            )
        run._check_config(run.info(), read_bytes(path / "config.yaml"))
        if run.status() != "running":
            checkpoints.repair_interrupted_swap(run.checkpoints)
        return run

    def read(self) -> tuple[dict[str, Any], str]:
        """Return run.json and the text of config.yaml, each read once. Unlike `open`, nothing is repaired."""
        info, path = self.info(), self.path / "config.yaml"
        try:
            content = read_bytes(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        self._check_config(info, content)
        return info, content.decode(errors="replace")

    def _check_config(self, info: dict[str, Any], content: bytes) -> None:
        stored = [info.get("config_sha256"), *(change["config_sha256"] for change in info.get("changes", [])[-1:])]
        if hashlib.sha256(content).hexdigest() not in stored:
            raise UserError(f"{self.path / 'config.yaml'} is damaged or was edited: it does not match run.json")

    def claim(self, finished: bool = False) -> None:
        """Lock an interrupted run for this process, to resume it; its status stays until `tracked` changes it.

        Args:
            finished: whether the run was finished when the caller decided to resume it; another may have done so since.

        Raises:
            UserError: when another process is training in it, or it cannot be written.
            RunFailed: when the disk is full.
        """
        if compressed(self.path / "metrics.jsonl").exists():
            raise UserError(f"{self.path} was exported with --trajectory: it is read, never resumed")
        _check_name(self.path)
        try:
            if self.status() == "running" or not self._acquire():
                info = self.info()
                raise UserError(f"{self.path} is running (process {info.get('pid')} on {info.get('host')})")
            if not finished and self.status() == "finished":
                self._release()
                raise UserError(f"{self.path} was just finished by another process: there is nothing to resume")
            self.update(pid=os.getpid(), host=socket.gethostname())
        except OSError as error:
            self._release()
            raise write_error(self.path, error) from error

    def _acquire(self) -> bool:
        """Lock the directory, and remove what a process that was killed left there; False if another has the lock."""
        try:
            self._lock = lock_file(self.path / ".lock", seconds=0.2)  # a reader holds it for microseconds
        except BlockingIOError:
            return False
        try:
            for left in (*self.path.glob(TEMPORARY.format("*")), *self.path.glob(f"data/{TEMPORARY.format('*')}")):
                remove(left)
            is_stored = (self.path / "run.json").exists()
            checkpoints.remove_leftovers(self.checkpoints, is_stored and "pruned" in self.info())
        except BaseException:
            self._release()
            raise
        return True

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _is_locked(self) -> bool | None:
        """Return whether a process trains in the run; None if that cannot be known. Readers share the lock."""
        try:
            with open_own(self.path / ".lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError) as error:
            return isinstance(error, BlockingIOError)
        except OSError:  # a file system without locks
            return None
        return False

    def _discard(self) -> None:
        """Remove what this object has created: the directory is as it was before."""
        assert self._made is not None
        with contextlib.suppress(OSError):
            self._made.remove_files()
        self._release()
        self._made.remove_folders()

    def _has_begun(self) -> bool:
        """Whether a step was taken, so that there is something to keep."""
        lines = self._metrics_log.read_valid()[0]
        return trajectory.count_steps(self.trajectory) > 0 or any(line["step"] for line in lines)

    def _is_free(self) -> bool:
        """Whether a new run may use the directory: it holds no run, or one that ended before training began."""
        if not (self.path / "config.yaml").exists():
            return True
        if any((self.path / name).exists() for name in ("metrics.jsonl", "trajectory.bin", "checkpoints")):
            return False
        if not (self.path / "run.json").exists():  # the process ended between its first two files
            text = (self.path / "config.yaml").read_text(encoding="utf-8", errors="replace").rstrip("\0")
            return text[:6] == "task:\n"[: len(text)]  # and not a config.yaml of something else
        try:
            return self.info().get("status") == "failed"
        except UserError:
            return False

    # --- run.json ---

    def info(self) -> dict[str, Any]:
        """Return run.json without its checksum. A format that is not known is refused."""
        path = self.path / "run.json"
        values = read_json(path)
        found = values.get("format")
        if found != FORMAT:
            raise UserError(
                f"{self.path}: of a version of mezo before 1.0, or of a format that this one does not know: {found}"
            )
        return self._checked(path, values)

    def update(self, **fields: Any) -> None:
        """Set fields of run.json."""
        self._write_info({**self.info(), **fields})

    def _write_info(self, values: dict[str, Any]) -> None:
        write_atomically(self.path / "run.json", json.dumps(add_checksum(values), indent=2) + "\n")

    @staticmethod
    def _checked(path: Path, values: dict[str, Any]) -> dict[str, Any]:
        if verify_checksum(values) is None:
            raise UserError(f"{path} is damaged: it does not match its own checksum")
        return {key: value for key, value in values.items() if key != "crc"}

    def status(self, info: dict[str, Any] | None = None) -> str:
        """Return running, finished, failed or interrupted. A run whose process is gone is interrupted.

        Args:
            info: run.json, if it was read already.
        """
        info = self.info() if info is None else info
        status = info.get("status")
        if status not in STATUSES:
            raise UserError(f"{self.path / 'run.json'} is damaged: its status is {status}")
        if status != "running":
            return str(status)
        is_locked = self._is_locked()
        is_running = may_be_alive(info) if is_locked is None else is_locked
        return "running" if is_running else "interrupted"

    def steps_at_end(self, steps: int) -> int:
        """Return the number of steps that the run ends with: `steps` of its config, unless it was stopped before."""
        return int((self.info().get("stopped") or {}).get("step", steps))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in the run inside the block; its status stays as it is."""
        if self.status() == "running" or not self._acquire():
            raise UserError(f"{self.path} is running")
        try:
            yield
        finally:
            self._release()

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Record in run.json that the run is running, then how the block ended, and write the log to train.log.

        SIGTERM and SIGHUP are as Ctrl-C. The caller has created or claimed the run. A mistake of the user before the
        first step removes a run that was created, unless it is a sweep's job, which keeps its error.

        Raises:
            RunFailed: in place of an `OSError` (a full disk, a folder that was removed).
        """
        handler = LogFile(self.path / "train.log")
        log.addHandler(handler)
        try:
            with termination_as_keyboard_interrupt():
                failed = {"verdict": None} if "verdict" in self.info() else {}  # of its last end
                self.update(status="running", end=None, error=None, stopped=None, **failed)
                yield
            self.update(status="finished", end=utc_now(), error=None)
        except KeyboardInterrupt:
            self._record_end("interrupted", "interrupted")
            how = "" if IN_SWEEP in os.environ else f"; resume with: {run_command('resume', self.path, self.info())}"
            log.warning("interrupted%s", how)
            raise
        except RunStopped as stop:
            self._record_end("interrupted", str(stop))
            log.warning("%s; resume with: %s", stop, run_command("resume", self.path, self.info()))
            raise
        except (UserError, RunFailed) as error:
            is_mistake = isinstance(error, UserError) and self._made and not self._has_begun()
            if is_mistake and not sweep_record.is_job(self.path):
                self._discard()
                raise
            self._record_end("failed", str(error))
            handler.emit(log.makeRecord(log.name, logging.ERROR, "", 0, str(error), (), None))
            raise
        except BaseException as error:
            self._record_end("failed", f"{type(error).__name__}: {error}")
            handler.emit(log.makeRecord(log.name, logging.ERROR, "", 0, "the run failed", (), sys.exc_info()))
            if isinstance(error, OSError):
                raise RunFailed(f"{self.path}: {error}") from error
            raise
        finally:
            log.removeHandler(handler)
            handler.close()
            self._release()

    def _record_end(self, status: str, error: str) -> None:
        try:
            self.update(status=status, end=utc_now(), error=without_credentials(error))
        except (OSError, UserError) as failed:  # the first error is the one to report
            log.error("run.json could not be written: %s", failed)

    # --- metrics, trajectory, summary, rows ---

    def sync_metrics(self) -> None:
        """Wait until the lines of metrics.jsonl are on the disk."""
        self._metrics_log.sync()

    def read_valid_metrics(self) -> tuple[list[dict[str, Any]], str | None]:
        """Return the lines of metrics.jsonl before damage at its end; see `MetricsLog.read_valid`."""
        return self._metrics_log.read_valid()

    def log_metrics(self, record_kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl. An evaluation on dev has the checksum of the completions so far."""
        if values.get("split") == "dev" and self._completions.path.exists():
            values = {"completions_crc": self._completions.last_checksum(), **values}
        self._metrics_log.append(record_kind, step, **values)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl without an incomplete last one."""
        return self._metrics_log.read()

    def evaluations(self, split: str) -> list[dict[str, Any]]:
        """Return the evaluations on a split, in order."""
        return [m for m in self.metrics() if m["kind"] == "eval" and m["split"] == split]

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines after `step` and those of the end of the run, so that a resumed run writes none twice."""
        lines = self._metrics_log.read_valid()[0]
        ends = (line["step"] > step or line.get("split") in ("train", "test") for line in lines)
        kept = lines[: next(itertools.compress(itertools.count(), ends), len(lines))]
        completions = self._tied_completions(kept)
        self._metrics_log.cut(len(kept))
        if self._completions.path.exists():
            self._completions.cut(len(completions))

    def log_completions(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the records of the first dev rows to completions.jsonl: what the model said at an evaluation."""
        for row, record in enumerate(records):
            self._completions.append("completion", step, row=row, **record)
        self._completions.sync()

    def completions(self) -> dict[int, list[dict[str, Any]]]:
        """Return step -> what the model said of the first dev rows then, in their order; {} for a run without."""
        lines = self._metrics_log.read_valid()[0]
        by_step: dict[int, dict[int, dict[str, Any]]] = {}
        for line in self._tied_completions(lines, is_all=self.status() == "finished"):
            by_step.setdefault(line["step"], {})[line["row"]] = line
        return {step: [rows[row] for row in sorted(rows)] for step, rows in sorted(by_step.items())}

    def _tied_completions(self, lines: Sequence[Mapping[str, Any]], is_all: bool = False) -> list[dict[str, Any]]:
        """Return the lines of completions.jsonl up to the last evaluation in `lines`, which names it.

        What follows is of an evaluation that was interrupted; `is_all`: nothing may.
        """
        path, named = self._completions.path, [line["completions_crc"] for line in lines if "completions_crc" in line]
        if not path.exists() and compressed(self._metrics_log.path).exists():  # what was shared has none
            return []
        found = self._completions.read_valid()[0] if named or is_all else []
        count = next((number for number, line in enumerate(found, 1) if named and line["crc"] == named[-1]), 0)
        if (named and not count) or (is_all and count < len(found)):
            raise UserError(f"{path} is damaged: it is not what metrics.jsonl says that this run has written")
        return found[:count]

    def open_trajectory(self, keep: int = 0) -> BinaryIO:
        """Open trajectory.bin to append after its first `keep` bytes; the rest is cut."""
        file = open_own(self.trajectory, "r+b" if keep else "wb")
        file.truncate(keep)
        file.seek(keep)
        sync(self.path)
        return file

    def read_trajectory(self) -> trajectory.Trajectory:
        """Read the trajectory for a reader of the run's results.

        A part of a record at the end is left out: a kill leaves that. Whole records that fail their checksums are
        damage to a reader (`mezo resume` cuts them), and a finished run has neither.
        """
        past = trajectory.read(self.trajectory)
        if past.lost_records or (past.cut_bytes and self.status() == "finished"):
            raise UserError(f"{self.trajectory} is damaged: it is sound up to step {len(past)}")
        return past

    def check_finished(self, steps: int, is_replayable: bool) -> None:
        """Check that a finished run has its summary, and a trajectory of all its steps; any other run passes.

        Of the trajectory only header and size are looked at.

        Args:
            steps: of its config.
            is_replayable: whether its optimizer writes a trajectory.
        """
        if self.status() == "finished":
            steps = int(self.read_summary().get("steps", self.steps_at_end(steps)))
            if is_replayable:
                trajectory.check_length(self.trajectory, steps)

    def save_initial_state(self, write: Callable[[Path], None]) -> None:
        """Save the initial weights that the base model does not have; `write` writes a file, if there are any.

        Raises:
            RunFailed: when it cannot be written.
        """
        temporary = self.path / TEMPORARY.format(self.initial_state_file.name)
        try:
            remove(temporary)
            write(temporary)
            if temporary.exists():
                sync(temporary)
                os.replace(temporary, self.initial_state_file)
                sync(self.path)
        except Exception as error:  # a full disk raises different errors in each library
            temporary.unlink(missing_ok=True)
            raise RunFailed(str(write_error(self.initial_state_file, error))) from error

    def write_summary(self, values: dict[str, Any]) -> None:
        """Write summary.json with a checksum. Only a finished run has one."""
        self.sync_metrics()
        text = json.dumps(add_checksum(values), indent=2, allow_nan=False)
        write_atomically(self.path / "summary.json", text + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return summary.json without its checksum."""
        return self._checked(self.path / "summary.json", read_json(self.path / "summary.json"))

    def write_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Write what evaluations follow from, which the run reads again, with a checksum.

        `untrained.json` is of all splits before the first step; `last_dev.json`, in a run without a test split, of dev
        at the last evaluation.
        """
        write_atomically(self.path / name, json.dumps(add_checksum(dict(values)), allow_nan=False) + "\n")

    def read_values(self, name: str) -> dict[str, Any] | None:
        """Return the values of `write_values`; None if there are none."""
        path = self.path / name
        try:
            return self._checked(path, read_json(path)) if path.exists() else None
        except UserError as error:
            raise UserError(
                f"{error}; without this file the run continues, compared with no untrained model"
            ) from error

    def set_results_aside(self) -> None:
        """Rename the summary and predictions, if there are any, to summary-STEPS.json and predictions-STEPS.jsonl."""
        summary, predicted = self.path / "summary.json", self.path / "predictions.jsonl"
        if summary.exists():
            steps = self.read_summary()["steps"]
            if predicted.exists():  # first: after a crash in between, the summary says that both are to be renamed
                os.replace(predicted, self.path / f"predictions-{steps}.jsonl")
            os.replace(summary, self.path / f"summary-{steps}.json")

    def write_predictions(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write predictions.jsonl, whole: for each test row, in order, its columns, label, predicted, probabilities."""
        text = chained({"row": number, **row} for number, row in enumerate(rows))
        write_atomically(self.path / "predictions.jsonl", text)

    def predictions(self, lines: list[dict[str, Any]] | None = None) -> list[dict[str, Any]] | None:
        """Return the predictions for the test rows at the best checkpoint, in order.

        Each is `{"row", "columns", "label", "predicted", "probabilities"}`. None if there is no such file: the run has
        not finished, has no test split, or was made before there were predictions.

        Args:
            lines: of metrics.jsonl, if they were read already: the evaluations.
        """
        path = self.path / "predictions.jsonl"
        if not path.is_file() or not (self.path / "summary.json").is_file():
            return None
        tests = [line for line in (self.metrics() if lines is None else lines) if line.get("split") == "test"]
        predicted = tests[-1].get("predicted", {}) if tests else {}
        rows = [{key: value for key, value in line.items() if key != "crc"} for line in MetricsLog(path).read()]
        count = sum(predicted.values()) if predicted else (self.info().get("rows") or {}).get("test") or len(rows)
        counts = Counter(row["predicted"] for row in rows if "predicted" in row)
        if [row.get("row") for row in rows] != list(range(count)) or counts != Counter(predicted):
            raise UserError(f"{path} is damaged: its rows are not those of the test evaluation in metrics.jsonl")
        return rows

    def save_rows(self, split: str, lines: list[str]) -> None:
        """Save rows that came from memory as data/SPLIT.jsonl, so that the run can be repeated."""
        folder = self.path / "data"
        folder.mkdir(exist_ok=True)
        sync(self.path)
        write_atomically(folder / f"{split}.jsonl", "".join(f"{line}\n" for line in lines))

    # --- checkpoints ---

    def save_checkpoint(self, name: str, step: int, write: Callable[[Path], None]) -> None:
        """Save checkpoint `name` (best, last) of `step`; `write` writes its files into a folder."""
        checkpoints.save(self.checkpoints, name, step, write)

    def remove_checkpoints(self, steps: Mapping[str, int]) -> int:
        """Remove all checkpoints, whose steps are given, and record it; return the bytes that this frees."""
        size = checkpoints.set_aside(self.checkpoints)
        self.update(pruned={"time": utc_now(), "bytes": size, "checkpoints": dict(steps)})
        checkpoints.remove_leftovers(self.checkpoints, is_pruned=True)
        return size

    def make_logger_folder(self, name: str) -> Path:
        """Make the folder that a logger writes in, unless it is there."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def checkpoint_step(self, name: str) -> int | None:
        """Return the step of checkpoint `name`; None if there is none."""
        return checkpoints.read_step(self.checkpoints, name)


def _check_name(path: Path) -> None:
    """Check that libraries, which write UTF-8, can write in a directory of this name."""
    try:
        os.fspath(path.absolute()).encode()
    except UnicodeEncodeError as error:
        text = "no name of a run directory in this locale: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        raise UserError(f"{str(path)!a}: {text}") from error


class _Made:
    """What making a run in a folder adds to the disk: made before, it removes that again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders = [path for path in (folder, *folder.parents) if not path.exists()]
        self._kept = set(os.listdir(folder)) if folder.is_dir() else set()

    def remove_files(self) -> None:
        """Remove what is new in the folder."""
        for path in self._folder.iterdir():
            if path.name not in self._kept:
                remove(path)

    def remove_folders(self) -> None:
        """Remove the folders that are new, if they are empty."""
        with contextlib.suppress(OSError):
            for path in self._folders:
                path.rmdir()


def _why_no_run(path: Path) -> str:
    """Return what is wrong with a path, with the nearest name: the list of runs gives paths below `outputs`."""
    if sweep_record.exists(path) or sweep_record.is_search(path):
        return f"{path} is a sweep: name one of its runs"
    if path.is_dir():
        return f"{path} holds no run: there is no config.yaml"
    listed = Path("outputs") / path
    if listed.is_dir():
        return f"{path}: no such run directory (did you mean '{listed}'?)"
    near = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    return f"{path}: no such run directory{did_you_mean(path.name, near)}"
