"""Runs made by commit af9a540 (tests/fixtures/make_runs.py) still open, list, evaluate, resume and replay, bitwise
identical. What is compared exactly does not depend on the CPU: weights that a replay computes, and stored lines.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.stored import read_config
from mezo_cli.runs import Run
from mezo_cli.training import restore
from mezo_cli.training.session import Session
from mezo_cli.training.training_run import TrainingRun
from tests.command_line import error_line, mezo

RUNS = Path(__file__).resolve().parents[1] / "fixtures" / "runs"
EXPECTED: dict[str, dict[str, str]] = json.loads((RUNS / "expected.json").read_text())["adapter_model.safetensors"]
STEPS, INTERRUPTED_AT = 12, 7


pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run directories, which commands may write to."""
    folder = tmp_path_factory.mktemp("old") / "runs"
    shutil.copytree(RUNS, folder)
    return folder


@dataclass(frozen=True)
class Resumed:
    """An interrupted run, resumed to its end; `live` has the weights after each step of that training."""

    name: str
    run: Path
    live: dict[int, dict[str, bytes]]


@pytest.fixture(scope="module", params=EXPECTED)
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """The interrupted run of one method after the other."""
    return resume(RUNS / f"{request.param}-interrupted", tmp_path_factory.mktemp("resumed") / "run")


def resume(stored: Path, run: Path) -> Resumed:
    """Copy an interrupted run to `run`, and resume it."""
    made = Resumed(stored.name.removesuffix("-interrupted"), run, {})
    shutil.copytree(stored, run)
    evaluate_and_save = TrainingRun.evaluate_and_save

    def remember(state: TrainingRun, session: Session, *args: Any) -> None:
        evaluate_and_save(state, session, *args)
        made.live[state.step] = weights_of(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        patch.setattr(TrainingRun, "evaluate_and_save", remember)
        result = mezo("resume", made.run)
    assert result.code == 0, result
    return made


def stored_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(session: Session) -> dict[str, bytes]:
    """Return the bytes of the trainable tensors."""
    return {name: tensor.detach().float().numpy().tobytes() for name, tensor in session.params.tensors.items()}


def trained_weights(run: Path, name: str) -> dict[str, bytes]:
    """Return the bytes of the trainable tensors at `best`, `last` or a step."""
    return weights_of(restore.load_checkpoint(read_config(run / "config.yaml"), Run.open(run), name))


def test_there_is_a_finished_and_an_interrupted_run_for_each_method() -> None:
    assert {path.name for path in RUNS.iterdir() if path.is_dir()} == {
        f"{name}{end}" for name in EXPECTED for end in ("", "-interrupted")
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_it_opens(name: str, runs: Path) -> None:
    finished, interrupted = Run.open(runs / name), Run.open(runs / f"{name}-interrupted")
    assert (finished.status(), interrupted.status()) == ("finished", "interrupted")
    assert finished.metrics() == stored_lines(runs / name)
    assert finished.read_summary()["steps"] == STEPS
    for run in (finished, interrupted):
        config = read_config(run.path / "config.yaml")
        assert (config.steps, config.seed, config.peft.name) == (STEPS, 13, "bias")


def test_all_are_listed(runs: Path) -> None:
    rows = {row[0]: row for row in (line.split() for line in mezo("runs", runs).out.splitlines()) if row}
    for name in EXPECTED:
        assert rows[name][1] == "finished"
        assert f"{STEPS}/{STEPS}" in rows[name]
        assert rows[f"{name}-interrupted"][1] == "interrupted"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EXPECTED)
def test_best_last_and_a_step_are_evaluated_as_then(name: str, runs: Path) -> None:
    """The scores in metrics.jsonl are another machine's: accuracies agree, losses nearly."""
    run = runs / name
    dev = {line["step"]: line for line in stored_lines(run) if line.get("split") == "dev"}
    best = Run(run).read_summary()["best"]["step"]
    for checkpoint, step in (("best", best), ("last", STEPS), ("4", 4)):
        result = mezo("eval", run, "--checkpoint", checkpoint, "--split", "dev")
        assert result.code == 0, result
        accuracy, loss = (float(value) for value in result.out.splitlines()[-1].split()[:2])
        assert accuracy == pytest.approx(dev[step]["accuracy"], abs=1 / 24 + 1e-4)  # one row of 24 may flip
        assert loss == pytest.approx(dev[step]["loss"], abs=1e-3)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "step"), [(name, step) for name in EXPECTED for step in EXPECTED[name]])
def test_replay_gives_the_same_bits(name: str, step: str, runs: Path, tmp_path: Path) -> None:
    result = mezo("replay", runs / name, "--step", step, "--out", tmp_path / "out")
    assert result.code == 0, result
    weights = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == EXPECTED[name][step]


@pytest.mark.sample(1)
def test_an_interrupted_run_is_resumed_and_what_it_had_stays(resumed: Resumed) -> None:
    before, after = RUNS / f"{resumed.name}-interrupted", resumed.run
    trajectory = (before / "trajectory.bin").read_bytes()
    assert (after / "trajectory.bin").read_bytes().startswith(trajectory)
    lines = stored_lines(before)
    assert stored_lines(after)[: len(lines)] == lines
    assert max(line["step"] for line in lines) < STEPS
    run = Run.open(after)
    assert run.status() == "finished"
    assert run.read_summary()["steps"] == STEPS
    assert [line["step"] for line in run.evaluations("dev")] == [0, 4, 8, 12]


@pytest.mark.sample(1)
def test_its_last_step_before_the_interruption_has_the_finished_runs_weights(resumed: Resumed) -> None:
    for step in ("5", str(INTERRUPTED_AT)):
        assert trained_weights(resumed.run, step) == trained_weights(RUNS / resumed.name, step)


@pytest.mark.sample(1)
def test_a_resumed_run_replays_to_the_weights_it_ended_with(resumed: Resumed) -> None:
    assert list(resumed.live) == list(range(INTERRUPTED_AT, STEPS + 1))
    for step in (INTERRUPTED_AT, 10, STEPS):
        assert trained_weights(resumed.run, str(step)) == resumed.live[step]


def test_a_run_directory_of_then_is_not_taken_for_an_empty_one(runs: Path) -> None:
    words = ["model=demo", "data=demo", "steps=1", f"hydra.run.dir={runs / 'mezo'}"]
    assert "already holds a run" in error_line(mezo("train", *words))
