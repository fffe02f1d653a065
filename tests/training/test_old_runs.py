"""Runs made by earlier commits (tests/fixtures/make_runs.py) still open, list, evaluate, resume and replay, bitwise
identical. What is compared exactly does not depend on the CPU: weights that a replay computes, and stored lines.

Those of fixtures/decay, by commit c322d5d, round 1 - lr wd to float32, which later runs do not.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.stored import read_config
from mezo_cli.runs import Run, trajectory
from mezo_cli.training import restore
from mezo_cli.training.session import Session
from mezo_cli.training.training_run import TrainingRun
from tests.command_line import error_line, mezo

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
RUNS, DECAY = FIXTURES / "runs", FIXTURES / "decay"


def expected_in(folder: Path) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of the weights of each run after some steps."""
    expected: dict[str, dict[str, str]] = json.loads((folder / "expected.json").read_text())
    return expected["adapter_model.safetensors"]


EXPECTED, DECAYED = expected_in(RUNS), expected_in(DECAY)
STEPS, INTERRUPTED_AT = 12, 7


pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run directories, which commands may write to."""
    folder = tmp_path_factory.mktemp("old") / "runs"
    shutil.copytree(RUNS, folder)
    return folder


def resume(stored: Path, run: Path) -> dict[int, dict[str, bytes]]:
    """Copy an interrupted run to `run`, and resume it; return the weights after each step of that training."""
    live: dict[int, dict[str, bytes]] = {}
    shutil.copytree(stored, run)
    evaluate_and_save = TrainingRun.evaluate_and_save

    def remember(state: TrainingRun, session: Session, *args: Any) -> None:
        evaluate_and_save(state, session, *args)
        live[state.step] = weights_of(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "evaluate_and_save", remember)
        result = mezo("resume", run)
    assert result.code == 0, result
    return live


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


OF_RUNS = [(RUNS / name, step, EXPECTED[name][step]) for name in EXPECTED for step in EXPECTED[name]]
OF_DECAY = [(DECAY / name, step, DECAYED[name][step]) for name in DECAYED for step in ("5", "12")]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("run", "step", "digest"), OF_RUNS + OF_DECAY, ids=lambda value: Path(value).name[:12])
def test_replay_is_bitwise_identical(run: Path, step: str, digest: str, tmp_path: Path) -> None:
    result = mezo("replay", run, "--step", step, "--out", tmp_path / "out")
    assert result.code == 0, result
    weights = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == digest


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "finished", [*(RUNS / name for name in EXPECTED), *(DECAY / name for name in DECAYED)], ids=lambda path: path.name
)
def test_an_interrupted_run_is_resumed_as_it_began_and_replays_to_the_weights_it_ended_with(
    finished: Path, tmp_path: Path
) -> None:
    """A trajectory that says nothing of decay in float64 still does not, so its replay uses the factor of then."""
    before, after = finished.with_name(f"{finished.name}-interrupted"), tmp_path / "run"
    live, lines = resume(before, after), stored_lines(before)
    assert (after / "trajectory.bin").read_bytes().startswith((before / "trajectory.bin").read_bytes())
    past = trajectory.read(after / "trajectory.bin")
    assert (past.header.decay, len(past)) == (None, STEPS)
    assert stored_lines(after)[: len(lines)] == lines
    assert max(line["step"] for line in lines) < STEPS
    run = Run.open(after)
    assert (run.status(), run.read_summary()["steps"]) == ("finished", STEPS)
    assert [line["step"] for line in run.evaluations("dev")] == [0, 4, 8, 12]
    assert list(live) == list(range(INTERRUPTED_AT, STEPS + 1))
    assert trained_weights(finished, str(INTERRUPTED_AT)) == live[INTERRUPTED_AT]
    for step in (INTERRUPTED_AT, STEPS):
        assert trained_weights(after, str(step)) == live[step]


def test_a_run_directory_of_then_is_not_taken_for_an_empty_one(runs: Path) -> None:
    words = ["model=demo", "data=demo", "steps=1", f"hydra.run.dir={runs / 'mezo'}"]
    assert "already holds a run" in error_line(mezo("train", *words))
