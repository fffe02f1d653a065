"""A run's files: written whole or not at all; those that grow with it come back, torn ends are cut, damage is told."""

import dataclasses
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs import Run, checkpoints, trajectory
from mezo_cli.runs.atomic import LOCK, lock_file, write_atomically, write_file, write_folder
from mezo_cli.runs.jsonl import JsonLines
from tests.runs.test_run import new_run


def test_no_partial_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "old"


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        done.append(f"rename {new.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(tmp_path / "a", "text")
    assert done == ["sync .a.tmp", "rename a", f"sync {tmp_path.name}"]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "file").write_text("text")

    def on_a_full_disk(folder: Path) -> None:
        write(folder)
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors does

    with pytest.raises(RunFailed, match="out: cannot be written: I/O error: No space left"):
        write_folder(tmp_path / "out", on_a_full_disk)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", write)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["out", "out/file"]
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        write_folder(tmp_path / "out" / "file" / "out", write)


def test_what_another_process_writes_is_refused_and_its_leftovers_go(tmp_path: Path) -> None:
    """The campaign kills such commands, and runs two of them at once (tests/campaign/stops.py)."""
    lock = lock_file(tmp_path / LOCK.format("o"))
    with pytest.raises(UserError, match="another process writes it"):
        write_folder(tmp_path / "o", Path.mkdir)
    lock.release()
    (tmp_path / ".other.tmp").mkdir()
    (tmp_path / ".o.tmp").mkdir()
    write_file(tmp_path / "o", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", "o"]


def write(content: str) -> object:
    def files(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(content)
        (folder / "config.json").write_text("{}")

    return files


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.save_checkpoint("best", 0, write("step 0"))  # type: ignore[arg-type]

    def full(folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match=r"step 5: checkpoint .*best: cannot be written: .*No space left"):
        run.save_checkpoint("best", 5, full)
    assert run.checkpoint_step("best") == 0
    checkpoints.verify(run.checkpoints / "best")
    assert [p.name for p in run.checkpoints.iterdir()] == ["best"]


@pytest.mark.parametrize("cut", ["before", "between", "after"])
def test_a_crash_within_the_swap_is_repaired(tmp_path: Path, cut: str) -> None:
    with new_run(tmp_path).tracked():
        run = Run(tmp_path)
        run.save_checkpoint("best", 0, write("step 0"))  # type: ignore[arg-type]
    folder = tmp_path / "checkpoints"
    if cut == "before":
        write("half")(folder / ".best.tmp")  # type: ignore[operator]
    elif cut == "between":
        (folder / "best").rename(folder / ".best.old")
    else:
        write("older")(folder / ".best.old")  # type: ignore[operator]
    run = Run.open(tmp_path)
    assert run.checkpoint_step("best") == 0
    checkpoints.verify(folder / "best")
    run.save_checkpoint("best", 5, write("step 5"))  # type: ignore[arg-type]
    assert [p.name for p in folder.iterdir()] == ["best"]


def test_a_reader_repairs_nothing_in_a_running_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.update(status="running")
    run.save_checkpoint("best", 0, write("step 0"))  # type: ignore[arg-type]
    (run.checkpoints / "best").rename(run.checkpoints / ".best.old")
    Run.open(tmp_path)
    assert (run.checkpoints / ".best.old").exists()


def header(samples: int = 1, tensors: int = 3) -> trajectory.Header:
    names = [(f"roberta.encoder.layer.{i}.attention.self.query.weight", [1024, 1024]) for i in range(tensors)]
    return trajectory.Header("ab" * 32, "mezo", "gaussian", 42, samples, 0.1, names)


def recorded(path: Path, grads: list[list[float]], head: trajectory.Header, lr: float = 0.5) -> trajectory.Trajectory:
    """Write a file, and return what is read."""
    with open(path, "wb") as file:
        writer = trajectory.Writer(file, head)
        for step, g in enumerate(grads):
            writer.append(step, g, lr)
    return trajectory.read(path)


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2), max_size=20))
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, grads: list[list[float]]) -> None:
    path = tmp_path_factory.mktemp("t") / "trajectory.bin"
    past = recorded(path, grads, header(2))
    assert past.header == header(2)
    assert past.valid_bytes == path.stat().st_size
    assert past.records(0, len(past)) == [(i, g, 0.5) for i, g in enumerate(grads)]


def test_samples_that_were_not_drawn_are_no_gradients_of_zero(tmp_path: Path) -> None:
    """n-SPSA with a linear schedule draws 1, 1, 2, 2 samples; the records have room for 2."""
    past = recorded(tmp_path / "t", [[1.0], [-2.0], [3.0, 0.0], [-4.0, 5.0]], header(2))
    assert past.grads.tolist() == [[1.0, 0.0], [-2.0, 0.0], [3.0, 0.0], [-4.0, 5.0]]
    drawn = past.drawn_grads(lambda step: 1 + 2 * step // 4)
    assert drawn.tolist() == [1.0, -2.0, 3.0, 0.0, -4.0, 5.0]
    stats = trajectory.scalar_stats(drawn)
    assert stats == {"zero_fraction": pytest.approx(1 / 6), "mean_abs": 2.5, "min_abs": 0.0, "max_abs": 5.0}


def test_twenty_thousand_steps_of_a_large_model_stay_under_330_kb(tmp_path: Path) -> None:
    grads = np.random.default_rng(0).normal(size=(20_000, 1)).astype(np.float32)
    recorded(tmp_path / "t", grads.tolist(), header(tensors=400))
    assert (tmp_path / "t").stat().st_size < 330_000


def pack(path: Path, version: int, values: dict[str, Any]) -> None:
    packed = zlib.compress(json.dumps(values).encode())
    path.write_bytes(struct.pack("<8sHII", trajectory.MAGIC, version, len(packed), zlib.crc32(packed)) + packed)


@pytest.mark.parametrize(
    "more", [{"dtype": "bfloat16", "rounding": "stochastic"}, {"decay": "float64"}, {"clip": {"clip_g": "q0.9"}}]
)
def test_every_field_of_the_header_comes_back(more: dict[str, str], tmp_path: Path) -> None:
    head = dataclasses.replace(header(), **more)  # type: ignore[arg-type]
    past = recorded(tmp_path / "t", [[1.5]], head)
    assert past.header == head
    assert past.records(0, 1) == [(0, [1.5], 0.5)]
    assert trajectory.length(tmp_path / "t") == (1, 0)


@pytest.mark.parametrize(
    ("version", "changed", "line"),
    [
        (2, {}, "format version 2; this program reads version 1"),
        (1, {"engine": "vllm"}, "does not know such a header: engine: Unexpected keyword argument"),
        (1, {"dtype": "float8"}, r"theta is stored as float8 \(nearest\); this program knows float32"),
        (1, {"rounding": "stochastic"}, r"theta is stored as float32 \(stochastic\)"),
        (1, {"dtype": ["bfloat16"]}, "header: dtype: Input should be a valid string"),
        (1, {"decay": "float80"}, "header: decay: Input should be 'float64'"),
        (1, {"seed": ...}, "header: seed: Field required"),
        (1, {"samples": -1}, "header: samples: Input should be greater than 0"),
        (1, {"tensors": [("a", [-3])]}, "header: tensors.0.1.0: Input should be greater than 0"),
    ],
)
def test_what_is_unknown_is_refused_by_name(tmp_path: Path, version: int, changed: dict[str, Any], line: str) -> None:
    values = {**dataclasses.asdict(header()), **changed}
    pack(tmp_path / "t", version, {name: value for name, value in values.items() if value is not ...})
    with pytest.raises(UserError, match=line):
        trajectory.read(tmp_path / "t")
    with pytest.raises(UserError, match=line):
        trajectory.length(tmp_path / "t")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot be read"),
        (b"", "t is damaged"),
        (b"MEZOTRAJ" + bytes(40), r"t is damaged, or of a version of mezo before 1\.0"),
    ],
)
def test_what_is_no_trajectory_is_reported(tmp_path: Path, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match=line):
        trajectory.read(tmp_path / "t")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    for step, accuracy in ((0, 0.25), (5, 0.5), (10, 0.75), (15, 0.5)):
        log.append("eval", step, split="dev", accuracy=accuracy, seconds=step / 3)
    log.append("eval", 10, split="test", accuracy=0.7, seconds=9.0)
    return path


def test_what_is_appended_is_read(written: Path) -> None:
    lines = list(JsonLines(written))
    assert [line["step"] for line in lines] == [0, 5, 10, 15, 10]
    assert [json.loads(raw) for raw in written.read_text().splitlines()] == lines
    assert list(JsonLines(written.parent / "none.jsonl")) == []


@pytest.mark.parametrize("tail", [b'{"kind": "eval", "st', b"", b"\0", bytes(40)])
def test_what_a_crash_leaves_at_the_end_is_left_out(written: Path, tail: bytes) -> None:
    """A part of a line; the whole line without its line feed; after a power cut zeros in place of what is missing."""
    whole, lines = written.read_bytes(), list(JsonLines(written))
    written.write_bytes(whole + tail)
    assert list(JsonLines(written)) == lines
    written.write_bytes(whole[:-1] + tail[:1].strip(b"{"))
    assert list(JsonLines(written)) == lines[:-1]


@pytest.mark.parametrize("lost", range(4))
def test_a_lost_line_is_reported(written: Path, lost: int) -> None:
    lines = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
    with pytest.raises(UserError, match=rf"metrics\.jsonl:{lost + 1} is damaged"):
        list(JsonLines(written))


def test_an_incomplete_last_line_is_left_out_and_cut(written: Path) -> None:
    whole = written.read_bytes()
    written.write_bytes(whole[:-7])
    log = JsonLines(written)
    assert len(list(log)) == 4
    log.cut(3)
    assert written.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    log.append("train", 11, loss=1.0)
    assert [line["step"] for line in list(JsonLines(written))] == [0, 5, 10, 11]


def test_the_same_lines_at_another_speed_have_the_same_checksums(tmp_path: Path) -> None:
    made = []
    for speed in (1.0, 2.0):
        log = JsonLines(tmp_path / f"{speed}.jsonl")
        for step in range(3):
            log.append("train", step, loss=0.1 * step, seconds=step * speed)
        made.append([{k: v for k, v in line.items() if k != "seconds"} for line in list(log)])
    assert made[0] == made[1]
    assert "crc" in made[0][0]


def test_a_number_that_is_none_is_never_written(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        log.append("train", 1, loss=float("nan"))
    assert list(log) == []
