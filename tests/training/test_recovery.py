"""Where an interrupted run goes on: after a power cut at the last step that is stored whole; damage is refused."""

import json
from pathlib import Path

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import to_yaml
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, completeness, trajectory
from mezo_cli.training import recovery

CONFIG = build_config(["steps=20", "eval_every=5", "log_every=2"])
HEADER = trajectory.Header("ab" * 32, "mezo", "gaussian", 42, 1, 0.0, [("weight", [2, 2])])
RECORD = 16


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that was killed after step 13: evaluations at 0, 5 and 10, lines of every second step."""
    run = Run.create(tmp_path / "run", to_yaml(CONFIG), [])
    run.log_metrics("eval", 0, split="dev", accuracy=0.5)
    writer = trajectory.Writer(run.open_trajectory(), HEADER)
    for step in range(1, 14):
        if CONFIG.logs_at(step):
            run.log_metrics("train", step, loss=1.0)
        writer.append(step - 1, [float(step)], 1e-3)
        if CONFIG.evaluates_at(step):
            run.log_metrics("eval", step, split="dev", accuracy=0.5)
    writer.close()
    return run


def cut_lines(run: Run, count: int) -> None:
    path = run.path / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-count]))


def change(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def found(run: Run) -> recovery.SoundStep:
    sound = recovery.find_sound_step(CONFIG, run)
    assert sound is not None
    return sound


def test_a_killed_run_goes_on_where_it_was(run: Run) -> None:
    assert found(run) == recovery.SoundStep(13, [], None)
    run.log_metrics("train", 14, loss=1.0)  # the line of a step is written before its record
    assert found(run) == recovery.SoundStep(13, [], None)


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("how", ["lost", "zeros", "torn"])
def test_several_bad_records_at_the_end_are_left_out(run: Run, bad: int, how: str) -> None:
    data = run.trajectory.read_bytes()
    tail = {"lost": b"", "zeros": bytes(bad * RECORD), "torn": data[-bad * RECORD :][:5]}[how]
    run.trajectory.write_bytes(data[: -bad * RECORD] + tail)
    sound = found(run)
    assert (sound.step, sound.damage) == (13 - bad, None)
    assert bool(sound.lost) == (how != "lost")


def test_a_lost_evaluation_is_repeated(run: Run) -> None:
    cut_lines(run, 2)  # the evaluation of step 10, and the line of step 12
    sound = found(run)
    assert (sound.step, sound.damage) == (10, None)
    assert sound.lost == [f"{run.path / 'metrics.jsonl'} lacks the evaluation of step 10"]


@pytest.mark.parametrize("tail", [b'{"kind": "tra', bytes(40), bytes(8) + b"\n", b'{"kind"\n{"x\n'])
def test_unsound_lines_at_the_end_are_left_out(run: Run, tail: bytes) -> None:
    cut_lines(run, 1)
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + tail)
    sound = found(run)
    assert (sound.step, sound.damage) == (11, None)
    run.truncate_metrics(sound.step)
    assert max(line["step"] for line in run.metrics()) == 10


def test_a_bad_record_with_a_sound_one_behind_it_is_damage(run: Run) -> None:
    change(run.trajectory, run.trajectory.stat().st_size - 2 * RECORD)
    assert "trajectory.bin is damaged: the record of step 11" in str(found(run).damage)
    with pytest.raises(UserError, match="the record of step 11"):
        trajectory.read(run.trajectory)


def test_a_bad_line_with_a_sound_one_behind_it_is_damage(run: Run) -> None:
    change(run.path / "metrics.jsonl", 20)
    assert "metrics.jsonl:1 is damaged" in str(found(run).damage)


@pytest.mark.parametrize("bad", [1, 2])
def test_damaged_records_at_the_end_are_named_before_they_are_left_out(run: Run, bad: int) -> None:
    for number in range(bad):
        change(run.trajectory, run.trajectory.stat().st_size - number * RECORD - 5)
    warnings: list[str] = []
    assert len(completeness.read_trajectory(run, warnings.append)) == 13 - bad
    (warning,) = warnings
    assert warning.startswith(f"{run.trajectory} is damaged: ")
    assert f"{run.trajectory} is damaged: its last {bad * RECORD} bytes" in found(run).lost[0]
    run.update(status="finished")
    with pytest.raises(UserError, match=f"is damaged: its last {bad * RECORD} bytes hold no sound record"):
        completeness.read_trajectory(run, warnings.append)


def test_a_part_of_a_record_at_the_end_needs_no_warning(run: Run) -> None:
    """Every kill can leave it. A finished run was not killed."""
    run.trajectory.write_bytes(run.trajectory.read_bytes()[:-5])
    warnings: list[str] = []
    assert len(completeness.read_trajectory(run, warnings.append)) == 12
    assert warnings == []
    run.update(status="finished")
    with pytest.raises(UserError, match="is damaged: its last 11 bytes"):
        completeness.read_trajectory(run, warnings.append)


def test_a_trajectory_that_ends_before_an_evaluation_is_damage(run: Run) -> None:
    """Its records were on the disk before the evaluation's line was written."""
    run.trajectory.write_bytes(run.trajectory.read_bytes()[: -4 * RECORD])
    assert "it holds 9 steps, but metrics.jsonl the evaluation of step 10" in str(found(run).damage)


def test_more_than_one_lost_evaluation_is_damage(run: Run) -> None:
    (run.path / "metrics.jsonl").unlink()
    assert "it lacks the evaluation of step 0" in str(found(run).damage)


def test_a_torn_header_with_nothing_trained_is_no_run_yet(run: Run) -> None:
    head = run.trajectory.read_bytes()[:30]
    for torn in (head, bytes(30), b""):
        run.trajectory.write_bytes(torn)
        with pytest.raises(UserError, match=r"trajectory\.bin is (damaged|missing)"):
            recovery.find_sound_step(CONFIG, run)
    (run.path / "metrics.jsonl").unlink()
    for torn in (head, bytes(30), b""):
        run.trajectory.write_bytes(torn)
        assert recovery.find_sound_step(CONFIG, run) is None


def test_without_a_trajectory_the_lines_until_the_checkpoint_are_needed(run: Run) -> None:
    config = build_config(["steps=20", "eval_every=5", "log_every=2", "optimizer=adamw"])
    run.save_checkpoint("last", 10, lambda folder: None)
    assert recovery.find_sound_step(config, run) == recovery.SoundStep(10, [], None)
    cut_lines(run, 2)
    assert recovery.find_sound_step(config, run) == recovery.SoundStep(10, [], None)  # the evaluation is repeated
    cut_lines(run, 1)
    sound = recovery.find_sound_step(config, run)
    assert sound is not None
    assert "lacks the line of step 10" in str(sound.damage)
    assert json.loads((run.path / "checkpoints" / "last" / "mezo.json").read_text())["step"] == 10
