"""Loggers receive what metrics.jsonl has: TensorBoard, W&B and Trackio as they are installed, read back from disk."""

import json
import logging
import signal
import sqlite3
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, OpenAiConfig
from mezo_cli.config.stored import read_config, to_yaml
from mezo_cli.runs import Run
from mezo_cli.training import loggers
from mezo_cli.training.loggers.base import LoggedRun, RunEnd, RunLoggers
from mezo_cli.training.run_log import RunLog
from tests.command_line import HANGS, Train, error_line, mezo, small, start
from tests.interruption import interrupted_at

FINISHED = RunEnd("finished", 8, summary={"final/test_accuracy": 0.75})
STOPPED = RunEnd("interrupted", 5, "interrupted")
FAILED = RunEnd("failed", 5, "step 6: the loss is not finite")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")


def a_run(folder: Path, *names: str) -> tuple[Run, Config]:
    config = build_config(["model=demo", "data=demo", f"logger=[{','.join(names)}]", "logger.tags=[mine]"])
    return Run.create(folder, to_yaml(config), ["mezo"]), config


def give(
    run: Run, config: Config, steps: Sequence[int], end: RunEnd, resumed_at: int | None = None, logged: int = 0
) -> None:
    """Give the loss of some steps to the loggers of a run."""
    active = RunLoggers(config, run)
    active.open(resumed_at, {"train": logged})
    for step in steps:
        active.log(step, {"train/loss": 1 / step})
    active.close(end)


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]


# --- tensorboard ---


def events(run: Path) -> EventAccumulator:
    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(run: Path) -> list[tuple[str, int, float]]:
    """Return tag, step and value of all scalars but the summary's, in the order of their steps."""
    found = events(run)
    tags = [tag for tag in found.Tags()["scalars"] if not tag.startswith("final/")]
    return sorted((tag, event.step, event.value) for tag in tags for event in found.Scalars(tag))


def logged_scalars(run: Path) -> list[tuple[str, int, float]]:
    """Return the same from metrics.jsonl, `seconds` left out."""
    wanted = []
    for line in Run(run).metrics():
        if line["kind"] == "train":
            names = set(line) - {"kind", "step", "seconds", "crc"}
            wanted += [(f"train/{name}", line["step"], line[name]) for name in names]
        elif line["split"] == "dev":
            wanted += [(f"dev/{name}", line["step"], line[name]) for name in ("accuracy", "loss")]
    return sorted((tag, step, pytest.approx(value, rel=1e-6)) for tag, step, value in wanted)


def text(run: Path, tag: str) -> str:
    return str(events(run).Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode())


def test_tensorboard_has_what_metrics_have(train: Train, tmp_path: Path) -> None:
    """Interrupted after step 5 of 6, and resumed from the checkpoint of step 3: steps 4 and 5 are there once."""
    run = tmp_path / "run"
    words = ["logger=tensorboard", "optimizer=sgd", "log_every=1", "objective=cls"]
    with interrupted_at(RunLog, "record", 5, after=True):
        assert train(run, *words).code == 130
    assert [step for tag, step, _ in scalars(run) if tag == "train/loss"] == [1, 2, 3, 4, 5]
    assert text(run, "status") == "interrupted interrupted"
    assert mezo("resume", run).code == 0
    found = [one for one in scalars(run) if one[0] != "train/seconds"]
    assert found == logged_scalars(run)
    assert [step for tag, step, _ in found if tag == "train/loss"] == [1, 2, 3, 4, 5, 6]
    final = events(run).Scalars("final/test_accuracy")[0]
    assert (final.step, final.value) == (6, pytest.approx(Run(run).read_summary()["test"]["accuracy"]))
    assert text(run, "status") == "finished"
    assert "optimizer.lr: 0.01" in text(run, "config")
    assert text(run, "tags") == "sst2, cls, sgd, roberta-large, files"


# --- wandb ---


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    run, config = a_run(tmp_path / "run", "wandb")
    give(run, config, range(1, 6), FAILED)
    (found,) = read_offline_runs(run.path / "wandb")
    assert (found.id, found.name) == (run.info()["logged_as"]["id"], "run")
    assert (found.project, found.tags) == ("mezo", ["sst2", "mlm", "mezo", "demo", "mine"])
    assert (found.config["optimizer"]["eps"], found.config["task"]["labels"]) == (1e-3, ["negative", "positive"])
    assert found.history == {step: {"train/loss": 1 / step} for step in range(1, 6)}
    assert (found.exit_code, found.summary["status"], found.summary["error"]) == (1, "failed", FAILED.error)
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", "config.yaml", "run.json", "wandb"]


@pytest.mark.slow
def test_wandb_goes_on_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")  # no key: offline, without a question
    for name, value in {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}.items():
        monkeypatch.setenv(name, value)
    run, config = a_run(tmp_path / "run", "wandb")
    give(run, config, range(1, 6), STOPPED)
    time.sleep(1.1)  # W&B names its folders by the second
    give(run, config, range(4, 9), FINISHED, resumed_at=3, logged=5)
    first, second = read_offline_runs(run.path / "wandb")
    assert first.id == second.id
    assert first.steps + second.steps == list(range(1, 9))
    assert (first.exit_code, second.exit_code) == (255, 0)
    assert second.summary["final/test_accuracy"] == 0.75
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing in the home directory


# --- trackio ---


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run / "trackio" / "mezo.db") as database:
        return database.execute(query).fetchall()


def count_rows(run: Path) -> int:
    """Return how many rows Trackio has written: 0 as long as it has no table."""
    try:
        return int(rows(run, "SELECT COUNT(*) FROM metrics")[0][0])
    except sqlite3.OperationalError:
        return 0


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/elses")  # nothing is sent
    run, config = a_run(tmp_path / "run", "trackio")
    give(run, config, range(1, 6), FAILED)
    names = {name for (name,) in rows(run.path, "SELECT DISTINCT run_name FROM metrics")}
    assert names == {f"run-{run.info()['logged_as']['id'][:6]}"}
    found = [(step, json.loads(values)) for step, values in rows(run.path, "SELECT step, metrics FROM metrics")]
    assert found == [(step, {"train/loss": 1 / step}) for step in range(1, 6)]
    ((stored,),) = rows(run.path, "SELECT config FROM configs")
    assert json.loads(stored)["tags"] == ["sst2", "mlm", "mezo", "demo", "mine"]
    assert json.loads(stored)["optimizer"]["eps"] == 1e-3
    assert rows(run.path, "SELECT title, text, level, step FROM alerts") == [("run failed", FAILED.error, "error", 5)]


@pytest.mark.slow
def test_trackio_goes_on_after_a_resume(tmp_path: Path) -> None:
    run, config = a_run(tmp_path / "run", "trackio")
    give(run, config, range(1, 6), STOPPED)
    moved = tmp_path / "moved"
    run.path.rename(moved)
    give(Run(moved), config, range(4, 9), FINISHED, resumed_at=3, logged=5)
    found = rows(moved, "SELECT step, metrics FROM metrics ORDER BY id")
    assert [step for step, _ in found] == [*range(1, 9), 8]
    assert json.loads(found[-1][1]) == {"final/test_accuracy": 0.75}
    assert len(rows(moved, "SELECT DISTINCT run_id FROM metrics")) == 1
    assert rows(moved, "SELECT title, level FROM alerts") == [("run interrupted", "warn")]


# --- all at once, from the command line ---


@pytest.mark.slow
def test_three_at_once_and_nothing_outside_their_folders(roberta: Path, movies: Path, tmp_path: Path) -> None:
    run, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    words = small(roberta, movies, run, "logger=[tensorboard,wandb,trackio]", "log_every=1")
    process = start("train", *words, cwd=tmp_path, HOME=str(home))
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, out + err
    assert "left out" not in out
    assert "wandb  offline; send it by: wandb sync" in out
    assert read_config(run / "config.yaml").logger.names == ["tensorboard", "wandb", "trackio"]
    losses = [value for tag, _, value in scalars(run) if tag == "train/loss"]
    (offline,) = read_offline_runs(run / "wandb")
    assert [row["train/loss"] for step, row in offline.history.items() if step] == pytest.approx(losses)
    kept = [json.loads(values) for (values,) in rows(run, "SELECT metrics FROM metrics")]
    assert [row["train/loss"] for row in kept if "train/loss" in row] == pytest.approx(losses)
    assert offline.exit_code == 0
    assert [path for path in home.rglob("*") if path.is_file()] == []
    folders = {path.name for path in run.iterdir() if path.is_dir()}
    assert folders == {"checkpoints", "tensorboard", "trackio", "wandb"}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_keeps_its_scalars(number: int, status: int, roberta: Path, movies: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["steps=100000", "log_every=1", "eval_every=0", "optimizer.lr=1e-6", "logger=[wandb,trackio]"]
    process = start("train", *small(roberta, movies, run, *words), cwd=tmp_path)
    deadline = time.monotonic() + HANGS
    while (before := count_rows(run)) < 9:  # Trackio writes from a thread of its own
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(timeout=HANGS) == status
    if number == signal.SIGINT:
        (wandb_run,) = read_offline_runs(run / "wandb")
        assert wandb_run.exit_code == 255
        assert len(wandb_run.history) > 5
    assert count_rows(run) >= before


# --- a logger of another package, and loggers that fail ---


class Remembers:
    """A logger that another package could register; it fails where `fails_at` says."""

    package = "json"
    note = "here"
    fails_at: str | int | None = None
    calls: ClassVar[list[Any]] = []

    def __init__(self, run: LoggedRun) -> None:
        if self.fails_at == "start":
            raise RuntimeError("cannot start at https://user:SECRET@h")
        self.calls.append(run.name)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.fails_at == step:
            raise OSError(28, "No space left on device")
        self.calls.append((step, *scalars))

    def close(self, end: RunEnd) -> None:
        self.calls.append(end.status)


@pytest.mark.parametrize(
    ("fails_at", "line", "calls"),
    [
        (None, None, ["run", (1, "train/loss"), (2, "train/loss"), (3, "train/loss"), "finished"]),
        ("start", "from step 0 on: cannot start at https://h", []),
        (2, "from step 2 on: [Errno 28] No space left on device", ["run", (1, "train/loss")]),
    ],
)
def test_a_plug_in_gets_the_scalars_and_is_dropped_with_one_warning_when_it_raises(
    fails_at: Any, line: str | None, calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {**loggers.LOGGERS.built_in, "remembers": f"{__name__}:Remembers"}
    monkeypatch.setitem(loggers.LOGGERS.__dict__, "targets", targets)
    monkeypatch.setattr(Remembers, "fails_at", fails_at)
    monkeypatch.setattr(Remembers, "calls", [])
    run, config = a_run(tmp_path / "run", "tensorboard")
    config = config.replace(logger=config.logger.replace(names=["remembers", "tensorboard"]))
    log = logging.getLogger("mezo")
    with pytest.MonkeyPatch.context() as patch:
        warnings: list[str] = []
        patch.setattr(log, "warning", lambda text, *values: warnings.append(text % values))
        give(run, config, range(1, 4), FINISHED)
    assert Remembers.calls == calls
    assert warnings == ([] if line is None else [f"warning: logger=remembers is left out {line}"])
    assert [step for tag, step, _ in scalars(run.path) if tag == "train/loss"] == [1, 2, 3]  # the other one goes on


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_cannot_start_again_does_not_stop_a_resume(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = a_run(tmp_path / "run", name)
    if name == "wandb":
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    else:
        (run.path / name).write_text("in the way")
    with caplog.at_level(logging.INFO, logger="mezo"):
        give(run, config, range(4, 9), FINISHED, resumed_at=3, logged=5)
    reason = (
        'needs a package: pip install -e ".[wandb]" -c constraints/tested.txt' if name == "wandb" else "File exists"
    )
    assert [reason in line and "from step 3 on" in line for line in left_out(caplog)] == [True]


# --- settings ---


@pytest.mark.parametrize("name", loggers.LOGGERS.names)
def test_a_missing_package_is_refused_at_once(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda one, *rest: None if one == name else find(one, *rest))
    for words in (["train"], ["train", "-m", "seed=1,2"]):
        place = f"hydra.{'sweep' if '-m' in words else 'run'}.dir={tmp_path / 'run'}"
        words += ["model=demo", "data=demo", f"logger=[{name}]", place]
        assert f'logger={name} needs a package: pip install -e ".[{name}]" -c constraints/tested.txt' in error_line(
            mezo(*words)
        )
    assert not (tmp_path / "run").exists()


def test_a_logger_gets_nothing_of_the_config_that_no_run_stores(tmp_path: Path) -> None:
    run, config = a_run(tmp_path / "run", "tensorboard")
    engine = OpenAiConfig(name="openai", url="http://192.0.2.1:1", adapter_dir="/of/mine")
    give(run, config.replace(engine=engine), [1], FINISHED)
    told = text(run.path, "config")
    assert "engine.name: openai" in told
    assert "192.0.2.1" not in told
    assert "/of/mine" not in told


# --- what W&B keeps offline: run-ID.wandb is a log of protobuf records in LevelDB's format ---


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
