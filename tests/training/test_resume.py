"""An interrupted run, wherever it was interrupted, ends bitwise identical to one that was not."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import console
from mezo_cli.config.stored import read_config
from mezo_cli.objectives.base import Objective
from mezo_cli.optim.first_order import FirstOrder
from mezo_cli.optim.mezo import Mezo
from mezo_cli.runs import Run, checkpoints, trajectory
from mezo_cli.runs.jsonl import JsonLines
from mezo_cli.session import opening, restore
from mezo_cli.session.opening import opened
from tests import tiny
from tests.command_line import Result, error_line, mezo, ok, small
from tests.interruption import interrupted_at, replay_from_base

pytestmark = pytest.mark.usefixtures("eager_kernels")

MODES = {"full": [], "trajectory": ["checkpoint=trajectory"], "cls": ["objective=cls", "checkpoint_every=2"]}
MODES["samples"] = ["optimizer.samples=2", "optimizer.weight_decay=0.1", "optimizer.schedule=linear"]
MODES["torch"] = ["optimizer.noise=torch", "checkpoint=trajectory", "peft=none"]
MODES["probe"] = ["init=linear_probe", "probe_c=1", "checkpoint=trajectory"]
MODES["adamw"] = ["optimizer=adamw", "optimizer.weight_decay=0.1"]
MODES["sgd"] = ["optimizer=sgd", "optimizer.momentum=0.5", "objective=cls", "checkpoint_every=2"]
MODES["momentum"] = ["optimizer=mezo_momentum", "checkpoint=trajectory", "optimizer.lr=1e-3"]
MODES["adam"] = ["optimizer=mezo_adam", "optimizer.samples=2", "optimizer.sample_schedule=linear", "optimizer.lr=1e-3"]
MODES["buffer"] = ["optimizer=mezo_momentum", "optimizer.lr=1e-3"]
MODES["scalar"] = ["optimizer=mezo_adam", "optimizer.noise=rademacher", "optimizer.lr=1e-3"]
MODES["lp"] = ["optimizer=linear_probe", "steps=0", "probe_c=1"]
MODES["lp trajectory"] = [*MODES["lp"], "checkpoint=trajectory"]
MODES["bfloat16"] = ["model.dtype=bfloat16", "optimizer.weight_decay=0.1"]
MODES["float16"] = ["model.dtype=float16", "optimizer=mezo_momentum", "optimizer.lr=1e-3"]
MODES["es"] = ["optimizer=es", "optimizer.members=4", "optimizer.anchor={l1: 1e-3}", "optimizer.weight_decay=0.1"]
MODES["es two bytes"] = [*MODES["es"], "model.dtype=bfloat16", "optimizer.antithetic=true"]


@pytest.fixture(scope="module")
def movies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.movie_folder(tmp_path_factory.mktemp("data") / "movies")


@pytest.fixture(scope="module")
def whole(roberta: Path, movies: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Uninterrupted runs, one per mode, made on first use: call it only where no call is interrupted by a patch."""
    home = tmp_path_factory.mktemp("whole")
    ends: dict[str, Result] = {}

    def run(mode: str) -> Path:
        if mode not in ends:
            ends[mode] = mezo("train", *small(roberta, movies, home / mode, *MODES[mode]))
        assert ends[mode].code == 0, ends[mode]
        return home / mode

    return run


@pytest.fixture(scope="module")
def cut(roberta: Path, movies: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Copies of runs that are interrupted in step 6 of 6, one run per mode."""
    home = tmp_path_factory.mktemp("cut")

    def copy(mode: str, to: Path) -> Path:
        if not (home / mode).exists():
            with interrupted_at(FirstOrder if mode == "adamw" else Mezo, "step", 6):
                assert mezo("train", *small(roberta, movies, home / mode, *MODES[mode])).code == 130
        shutil.copytree(home / mode, to)
        return to

    return copy


def state(run: Path) -> dict[str, Any]:
    """Return everything in a run directory except times and memory."""
    summary = Run(run).read_summary()
    for name in ("seconds", "peak_memory_bytes"):
        summary.pop(name)
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in Run(run).metrics()]
    saved = [*run.rglob("*.safetensors"), *(p for p in run.glob("checkpoints/**/*") if p.is_file())]
    files = {p.relative_to(run): p.read_bytes() for p in saved}
    names = sorted(p.name for p in run.iterdir())
    steps = (run / "trajectory.bin").read_bytes() if (run / "trajectory.bin").exists() else b""
    status = Run(run).status()
    return {"summary": summary, "lines": lines, "files": files, "steps": steps, "names": names, "status": status}


CUTS: list[tuple[str, Any, str, int, bool]] = [
    ("while the model is loaded", opening, "_load", 1, False),
    ("before the first evaluation", Objective, "evaluate", 1, False),
    ("after the first evaluation", JsonLines, "append", 1, True),
    ("within a step", Mezo, "apply_updates", 2, True),
    ("before a metrics line", JsonLines, "append", 2, False),
    ("between a metrics line and its record", trajectory.Writer, "append", 4, False),
    ("after the record of the step that is evaluated", trajectory.Writer, "append", 3, True),
    ("after the best was saved, before its line", JsonLines, "append", 3, False),
    ("within a checkpoint", checkpoints, "save", 3, False),
    ("after the last step", trajectory.Writer, "append", 6, True),
    ("before the evaluation on train", Objective, "evaluate", 4, False),
    ("before the evaluation on test", Objective, "evaluate", 5, False),
    ("after the evaluation on test", Run, "write_summary", 1, False),
    ("after the summary", Run, "write_summary", 1, True),
]

OTHERS = [("cls", 5), ("trajectory", 7), ("samples", 3), ("torch", 5), ("probe", 2), ("lp", 1), ("lp trajectory", 1)]
OTHERS += [("momentum", 5), ("adam", 9), ("scalar", 10), ("adamw", 7), ("sgd", 8)]
OTHERS += [("bfloat16", 3), ("float16", 5), ("es", 5), ("es two bytes", 7)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("mode", "cut"), [("full", i) for i in range(len(CUTS))] + OTHERS)
def test_a_run_cut_anywhere_ends_bitwise_identical(
    mode: str, cut: int, whole: Callable[[str], Path], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    _, owner, name, call, after = CUTS[cut]
    run = tmp_path / "run"
    words = small(roberta, movies, run, *MODES[mode])
    with interrupted_at(owner, name, call, after):
        said = mezo("train", *words)
    assert (said.code, said.err) == (130, "error: interrupted\n"), said
    assert Run(run).status() == "interrupted"
    assert "interrupted" in mezo("runs", tmp_path).out
    said = ok("resume", run)
    assert state(run) == state(whole(mode))


def test_incomplete_last_records_are_cut(
    whole: Callable[[str], Path], cut: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    run = cut("full", tmp_path / "run")
    for name, tail in (("trajectory.bin", b"\x05\x00\x00\x00half"), ("metrics.jsonl", b'{"kind": "tra')):
        with open(run / name, "ab") as file:
            file.write(tail)
    assert mezo("resume", run).code == 0
    assert state(run) == state(whole("full"))


def test_a_damaged_last_record_is_named_by_every_reader(cut: Callable[[str, Path], Path], tmp_path: Path) -> None:
    run = cut("trajectory", tmp_path / "run")
    data = bytearray((run / "trajectory.bin").read_bytes())
    data[-1] ^= 1  # the record of step 4
    (run / "trajectory.bin").write_bytes(data)
    for words in (["replay", run, "--step", "2", "--out", tmp_path / "out"], ["eval", run, "--checkpoint", "last"]):
        assert "trajectory.bin is damaged: it is sound up to step 4" in error_line(mezo(*words))
    assert mezo("resume", run).code == 0
    assert "trajectory.bin: its last 16 bytes" in (run / "train.log").read_text()
    finished = run / "trajectory.bin"
    finished.write_bytes(finished.read_bytes()[:-1] + b"x")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    for words in (["eval", run], ["resume", run, "steps=8"]):
        assert "trajectory.bin is damaged: it is sound up to step 5" in error_line(mezo(*words))
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("mode", ["trajectory", "adamw"])
def test_a_lost_tail_of_both_files_is_trained_again(
    mode: str, whole: Callable[[str], Path], cut: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    """A power cut after step 5 took the line of the evaluation at step 3 and all that followed."""
    run = cut(mode, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [0, 0, 2, 3, 4]
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:30] + bytes(90))
    if mode == "trajectory":
        data = (run / "trajectory.bin").read_bytes()
        (run / "trajectory.bin").write_bytes(data[:-16] + bytes(40))
    ok("resume", run)
    assert "resumed at step 3 of 6" in (run / "train.log").read_text()
    assert ("going back to step 3" in (run / "train.log").read_text()) == (mode == "trajectory")
    assert state(run) == state(whole(mode))


def test_a_resumed_run_starts_from_the_newest_checkpoint(
    whole: Callable[[str], Path], cut: Callable[[str, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long run would be replayed for days."""
    run = cut("full", tmp_path / "run")
    shared = whole("full")
    replayed: list[list[int]] = []
    apply = Mezo.apply_updates

    def counted(self: Mezo, params: Any, records: list[Any]) -> None:
        replayed.append([record[0] for record in records])
        apply(self, params, records)

    monkeypatch.setattr(Mezo, "apply_updates", counted)
    assert mezo("resume", run).code == 0
    assert replayed[:2] == [[3, 4], [5]]
    assert state(run) == state(shared)


def test_stored_moments_are_not_rebuilt(
    whole: Callable[[str], Path], roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rebuilding them takes a draw of z per step of the run. A run without the file is rebuilt bitwise identically."""
    run, old = tmp_path / "run", tmp_path / "old"
    words = small(roberta, movies, run, *MODES["buffer"])
    with interrupted_at(trajectory.Writer, "append", 5, after=True):
        mezo("train", *words)
    shutil.copytree(run, old)
    held = old / "checkpoints" / "last" / restore.OPTIMIZER_STATE
    copied = partial(shutil.copytree, held.parent, ignore=only_weights, dirs_exist_ok=True)
    Run(old).save_checkpoint("last", 3, copied)
    assert not held.exists()

    rebuilt: list[int] = []
    rebuild = Mezo.rebuild_state

    def counted(self: Mezo, params: Any, records: list[Any]) -> None:
        rebuilt.extend(record[0] for record in records)
        rebuild(self, params, records)

    monkeypatch.setattr(Mezo, "rebuild_state", counted)
    assert mezo("resume", run).code == 0
    assert rebuilt == []
    assert mezo("resume", old).code == 0
    assert rebuilt == [0, 1, 2]
    assert state(run) == state(old) == state(whole("buffer"))


def only_weights(folder: str, names: list[str]) -> set[str]:
    return {restore.OPTIMIZER_STATE, checkpoints.CHECKSUMS}


def test_a_long_replay_shows_its_progress(
    whole: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole("full")
    clock = iter(range(0, 10_000, 10))  # ten seconds pass at every look
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(restore, "PART", 2)
    result = ok("replay", run, "--step", "6", "--out", tmp_path / "out")
    assert "replaying the trajectory: 2 of 6 steps  0.2 steps/s  20 s left" in result.out


def test_without_its_checkpoints_it_is_replayed(
    whole: Callable[[str], Path], cut: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    run = cut("full", tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    assert mezo("resume", run).code == 0
    for part in ("summary", "lines", "steps"):
        assert state(run)[part] == state(whole("full"))[part]
    last = Path("checkpoints/last/model.safetensors")
    assert state(run)["files"][last] == state(whole("full"))["files"][last]


def test_a_finished_run_is_left_as_it_is(whole: Callable[[str], Path]) -> None:
    before = {p: p.read_bytes() for p in whole("full").rglob("*") if p.is_file()}
    said = ok("resume", whole("full"))
    assert "is finished: there is nothing to resume" in said.out
    assert {p: p.read_bytes() for p in whole("full").rglob("*") if p.is_file()} == before


def test_a_failed_run_can_be_resumed_from_elsewhere(
    whole: Callable[[str], Path], roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local folders were given relative to the directory of the time."""
    run = tmp_path / "run"
    monkeypatch.chdir(roberta.parent)
    with pytest.MonkeyPatch.context() as patch:

        def broken(*_: Any) -> None:
            raise MemoryError("out of memory")

        patch.setattr(Mezo, "step", broken)
        assert mezo("train", *small(Path(roberta.name), movies, run)).code == 1
    assert Run(run).status() == "failed"
    monkeypatch.chdir(tmp_path)
    assert mezo("resume", "run").code == 0
    assert state(run) == state(whole("full"))


def test_other_data_or_another_model_are_refused(roberta: Path, movies: Path, tmp_path: Path) -> None:
    model, data, run = tmp_path / "model", tmp_path / "movies", tmp_path / "run"
    shutil.copytree(roberta, model)
    shutil.copytree(movies, data)
    with interrupted_at(Mezo, "step", 2):
        mezo("train", *small(model, data, run, "checkpoint=trajectory"))
    rows = (data / "dev.jsonl").read_text()
    (data / "dev.jsonl").write_text(rows.replace("film", "movie"))
    assert "the data have changed" in error_line(mezo("resume", run))
    (data / "dev.jsonl").write_text(rows)
    other = tiny.roberta(tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", model / "model.safetensors")
    assert "started from other weights" in error_line(mezo("resume", run))
    shutil.copy(roberta / "model.safetensors", model / "model.safetensors")
    assert mezo("resume", run).code == 0


def test_best_last_and_any_step_are_evaluated_alike_in_every_mode(whole: Callable[[str], Path]) -> None:
    full, light = whole("full"), whole("trajectory")
    assert not (light / "checkpoints").exists()
    for name in ("best", "last", "0", "2", "5"):
        said = [mezo("eval", run, "--checkpoint", name, "--split", "dev") for run in (full, light)]
        assert [s.code for s in said] == [0, 0], said
        assert said[0].out.splitlines()[1:] == said[1].out.splitlines()[1:]
    for run in (full, light):
        for name, step in (("best", json.loads((run / "summary.json").read_text())["best"]["step"]), ("last", 6)):
            line = next(m for m in Run(run).metrics() if m["step"] == step and m.get("split") == "dev")
            said_of_it = mezo("eval", run, "--checkpoint", name, "--split", "dev").out
            assert f"{line['accuracy']:.4f}  {line['loss']:.4f}" in said_of_it
        test = json.loads((run / "summary.json").read_text())["test"]
        assert f"{test['accuracy']:.4f}  {test['loss']:.4f}" in mezo("eval", run).out


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["full", "cls", "adam", "scalar"])
def test_replay_is_bitwise_identical(mode: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    run, out = whole(mode), tmp_path / "out"
    said = ok("replay", run, "--step", "6", "--out", out)
    new_head = "a new classification head, drawn from the seed: classifier.dense.bias"
    assert (new_head in (run / "train.log").read_text()) == (mode == "cls")
    assert "new classification head" not in said.out + said.err  # it is read from start.safetensors
    assert (out / "model.safetensors").read_bytes() == (run / "checkpoints/last/model.safetensors").read_bytes()
    made = read_config(run / "config.yaml")
    near, far = opened(made, Run(run), 4), replay_from_base(made, Run(run), 4)
    for (name, one), (_, other) in zip(
        near.loaded.model.state_dict().items(), far.loaded.model.state_dict().items(), strict=True
    ):
        assert one.equal(other), name


def test_without_a_trajectory_only_checkpoints_can_be_loaded(cut: Callable[[str, Path], Path], tmp_path: Path) -> None:
    run = cut("adamw", tmp_path / "run")
    for words in (["replay", run, "--step", "3", "--out", tmp_path / "out"], ["eval", run, "--checkpoint", "2"]):
        assert "writes no trajectory to replay" in error_line(mezo(*words))
    assert "last (step 3)" in error_line(mezo("eval", run, "--checkpoint", "5"))
    for name in ("best", "last", "3"):
        assert mezo("eval", run, "--checkpoint", name).code == 0
    held = run / "checkpoints" / "last" / restore.OPTIMIZER_STATE
    data = bytearray(held.read_bytes())
    data[len(data) // 2] ^= 1
    held.write_bytes(bytes(data))
    assert f"{restore.OPTIMIZER_STATE} is damaged" in error_line(mezo("resume", run))
    shutil.rmtree(held.parent)
    assert "last is missing: the run cannot be resumed without it" in error_line(mezo("resume", run))


def test_replay_is_refused_where_it_cannot_be(whole: Callable[[str], Path], tmp_path: Path) -> None:
    run = whole("full")
    for step in ("7", "-1"):
        assert "holds steps 0 to 6" in error_line(mezo("replay", run, "--step", step, "--out", tmp_path / "out"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    for out in (tmp_path / "taken", tmp_path / "taken" / "file"):
        assert "is not an empty folder" in error_line(mezo("replay", run, "--step", "1", "--out", out))
    under_a_file = tmp_path / "taken" / "file" / "out"
    assert "cannot be written" in error_line(mezo("replay", run, "--step", "1", "--out", under_a_file))
    assert not (tmp_path / "out").exists()
