"""Where an interrupted run goes on: after a power cut at the last step that is stored whole; damage is refused."""

import logging
from pathlib import Path

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import to_yaml
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, recovery, trajectory

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


def find(run: Run, caplog: pytest.LogCaptureFixture) -> tuple[int | None, str]:
    """Return the step that the run resumes at, and what the log says about it."""
    with caplog.at_level(logging.WARNING, logger="mezo"):
        step = recovery.find_resume_step(CONFIG, run)
    return step, caplog.text


def refusal(run: Run, config: Config = CONFIG) -> str:
    with pytest.raises(UserError) as error:
        recovery.find_resume_step(config, run)
    return str(error.value)


def test_a_killed_run_resumes_where_it_was(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    assert find(run, caplog) == (13, "")
    run.log_metrics("train", 14, loss=1.0)  # the line of a step is written before its record
    assert find(run, caplog) == (13, "")


@pytest.mark.parametrize("tail", [b"", bytes(2 * RECORD), bytes(5)])
def test_several_bad_records_at_the_end_are_left_out(run: Run, tail: bytes, caplog: pytest.LogCaptureFixture) -> None:
    run.trajectory.write_bytes(run.trajectory.read_bytes()[: -2 * RECORD] + tail)
    step, said = find(run, caplog)
    assert step == 11
    assert ("trajectory.bin" in said) == (tail != b"")


def test_a_lost_evaluation_is_repeated(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    cut_lines(run, 2)  # the evaluation of step 10, and the line of step 12
    step, said = find(run, caplog)
    assert step == 10
    assert "metrics.jsonl lacks the evaluation of step 10" in said


@pytest.mark.parametrize("tail", [b'{"kind": "tra', bytes(40), bytes(8) + b"\n", b'{"kind"\n{"x\n'])
def test_invalid_lines_at_the_end_are_left_out(run: Run, tail: bytes) -> None:
    cut_lines(run, 1)
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + tail)
    assert recovery.find_resume_step(CONFIG, run) == 11
    run.truncate_metrics(11)
    assert max(line["step"] for line in run.metrics()) == 10


@pytest.mark.parametrize(("name", "problem"), [("trajectory.bin", "the record of step 11"), ("metrics.jsonl", ":1 is")])
def test_a_change_with_something_valid_behind_it_is_damage(run: Run, name: str, problem: str) -> None:
    path = run.path / name
    change(path, path.stat().st_size - 2 * RECORD if name == "trajectory.bin" else 20)
    assert name in refusal(run)
    assert problem in refusal(run)


@pytest.mark.parametrize("bad", [1, 2])
def test_damaged_last_records_are_cut_by_resume_alone(run: Run, bad: int, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(bad):
        change(run.trajectory, run.trajectory.stat().st_size - number * RECORD - 5)
    with pytest.raises(UserError, match=rf"trajectory\.bin is damaged: it is sound up to step {13 - bad}"):
        run.read_trajectory()
    assert f"{run.trajectory}: its last {bad * RECORD} bytes" in find(run, caplog)[1]


def test_a_part_of_a_record_at_the_end_is_left_out_but_in_a_finished_run(run: Run) -> None:
    """Every kill can leave it. A finished run was not killed."""
    run.trajectory.write_bytes(run.trajectory.read_bytes()[:-5])
    assert len(run.read_trajectory()) == 12
    run.update(status="finished")
    with pytest.raises(UserError, match="is damaged: it is sound up to step 12"):
        run.read_trajectory()


def test_without_lines_it_begins_anew(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    (run.path / "metrics.jsonl").unlink()
    step, said = find(run, caplog)
    assert step == 0
    assert "metrics.jsonl lacks the evaluation of step 0" in said


def said_at(run: Run, *steps: int) -> None:
    for step in steps:
        run.log_completions(step, [{"completion": f"{step}a"}, {"completion": f"{step}b"}])
        run.log_metrics("eval", step, split="dev", reward=0.5)


@pytest.fixture
def saying(tmp_path: Path) -> Run:
    """A run that was killed after the evaluations of steps 0, 5 and 10, with completions of 15 that none names."""
    run = Run.create(tmp_path / "saying", to_yaml(CONFIG), [])
    said_at(run, 0, 5, 10)
    run.log_completions(15, [{"completion": "15a"}])
    return run


def test_completions_that_no_evaluation_names_are_cut(saying: Run) -> None:
    path = saying.path / "completions.jsonl"
    assert [[line["completion"] for line in lines] for lines in saying.completions().values()] == [
        ["0a", "0b"], ["5a", "5b"], ["10a", "10b"]
    ]  # fmt: skip
    saying.truncate_metrics(5)
    assert list(saying.completions()) == [0, 5]
    assert len(path.read_text().splitlines()) == 4
    said_at(saying, 10)
    path.write_bytes(path.read_bytes()[:-7])  # a crash leaves no less than a line of metrics.jsonl names
    with pytest.raises(UserError, match=r"completions\.jsonl is damaged"):
        saying.completions()


@pytest.mark.parametrize("how", ["flipped", "deleted", "emptied", "cut", "another's", "longer"])
def test_other_completions_are_refused_and_never_rewritten(saying: Run, how: str, tmp_path: Path) -> None:
    saying.truncate_metrics(10)
    path = saying.path / "completions.jsonl"
    other = Run.create(tmp_path / "other", to_yaml(CONFIG), [])
    said_at(other, 1, 6, 11)
    lines = path.read_bytes().splitlines(keepends=True)
    content = {
        "flipped": path.read_bytes().replace(b"5a", b"5c"),
        "deleted": None,
        "emptied": b"",
        "cut": b"".join(lines[:-1]),
        "another's": (other.path / "completions.jsonl").read_bytes(),
        "longer": path.read_bytes() + path.read_bytes(),
    }[how]
    path.unlink() if content is None else path.write_bytes(content)
    saying.update(status="finished")
    for read in (saying.completions, lambda: saying.truncate_metrics(10)):
        with pytest.raises(UserError, match=r"completions\.jsonl(:\d+)? is damaged"):
            read()
    assert (path.read_bytes() if path.exists() else None) == content


def test_a_torn_header_with_nothing_trained_is_no_run_yet(run: Run) -> None:
    head = run.trajectory.read_bytes()[:30]
    for torn in (head, bytes(30), b""):
        run.trajectory.write_bytes(torn)
        assert "trajectory.bin is " in refusal(run)
    (run.path / "metrics.jsonl").unlink()
    for torn in (head, bytes(30), b""):
        run.trajectory.write_bytes(torn)
        assert recovery.find_resume_step(CONFIG, run) is None


def test_without_a_trajectory_the_lines_until_the_checkpoint_are_needed(run: Run) -> None:
    config = build_config(["steps=20", "eval_every=5", "log_every=2", "optimizer=adamw"])
    run.save_checkpoint("last", 10, lambda folder: None)
    assert recovery.find_resume_step(config, run) == 10
    cut_lines(run, 2)
    assert recovery.find_resume_step(config, run) == 10  # the evaluation is repeated
    cut_lines(run, 1)
    assert "lacks the line of step 10" in refusal(run, config)
