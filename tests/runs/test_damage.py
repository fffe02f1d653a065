"""Damage to a run's files: told, or without effect; and where an interrupted run goes on after a power cut."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import to_yaml
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, checkpoints, recovery, trajectory
from mezo_cli.runs.jsonl import add_checksum
from tests.command_line import error_line, mezo

HEADER = trajectory.Header("ab" * 32, "mezo", "gaussian", 42, 1, 0.0, [("weight", [2, 2])])
ROWS: list[dict[str, Any]] = [
    {
        "columns": {"sentence": f"schön \u2028 {number}"},
        "label": "bad",
        "predicted": ("bad", "good")[number % 2],
        "probabilities": {"bad": 0.1 + 0.2, "good": 1 / (number + 3)},
    }
    for number in range(4)
]
BEST = "checkpoints/best"
READ: dict[str, Callable[[Run], object]] = {
    "run.json": lambda run: Run.open(run.path).info(),
    "config.yaml": lambda run: Run.open(run.path).read()[1],
    "metrics.jsonl": lambda run: [{**line, "seconds": 0.0} for line in run.metrics()],  # it has no checksum
    "trajectory.bin": lambda run: run.read_trajectory().records(0, 3),
    "predictions.jsonl": Run.predictions,
    "summary.json": Run.read_summary,
    f"{BEST}/mezo.json": lambda run: checkpoints.verify(run.path / BEST) or run.checkpoint_step("best"),
    f"{BEST}/model.safetensors": lambda run: checkpoints.verify(run.path / BEST),
}


@pytest.fixture
def finished(tmp_path: Path) -> Run:
    """A run of three steps that has all files."""
    run = Run.create(tmp_path / "run", to_yaml(build_config(["steps=3"])), [])
    run.update(rows={"test": len(ROWS)})
    with run.tracked():
        writer = trajectory.Writer(run.open_trajectory(), HEADER)
        for step in range(3):
            writer.append(step, [float(step)], 1e-3)
            run.log_metrics("eval", step, split="dev", accuracy=0.25 * step, seconds=step / 3)
        writer.close()
        run.save_checkpoint("best", 2, lambda folder: (folder / "model.safetensors").write_text("the weights"))  # type: ignore[arg-type, return-value]
        run.write_predictions(ROWS)
        run.log_metrics("eval", 2, split="test", accuracy=0.5, predicted={"bad": 2, "good": 2, "never": 0})
        run.write_summary({"steps": 3, "best": {"step": 2}, "seconds": 1.5})
    return run


@pytest.mark.parametrize("name", READ)
def test_every_flipped_bit_is_told_or_changes_nothing(finished: Run, name: str) -> None:
    path, told = finished.path / name, []
    whole, before = path.read_bytes(), READ[name](finished)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            assert READ[name](finished) == before
        except UserError as error:
            told.append(str(error))
    assert len(told) > 0.85 * len(whole)  # not all of `seconds`
    assert all(text.startswith(str(path if name != "run.json" else finished.path)) for text in told)
    path.unlink()
    if name not in ("metrics.jsonl", "predictions.jsonl"):
        with pytest.raises(UserError, match=r"no such file|missing|cannot be read|holds no run"):
            READ[name](finished)


def test_predictions_are_read_as_they_were_written_once_the_run_has_finished(finished: Run) -> None:
    assert finished.predictions() == [{"row": number, **row} for number, row in enumerate(ROWS)]
    (finished.path / "summary.json").unlink()
    assert finished.predictions() is None  # another try may end elsewhere


@pytest.mark.parametrize("kept", [[0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 2, 3, 3]])
def test_lost_predictions_are_noticed(finished: Run, kept: list[int]) -> None:
    file = finished.path / "predictions.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[number] for number in kept))
    with pytest.raises(UserError, match=r"predictions\.jsonl.* is damaged"):
        finished.predictions()


@pytest.mark.parametrize("found", [None, 2])
def test_a_run_of_another_format_is_refused_and_left_out_of_lists_by_name(finished: Run, found: int | None) -> None:
    """A version before 1.0 wrote no format."""
    values = {key: value for key, value in finished.info().items() if key != "format"}
    (finished.path / "run.json").write_text(json.dumps(add_checksum({**values, "format": found})))
    before = {path.name for path in finished.path.iterdir()}
    line = f"{finished.path}: of a version of mezo before 1.0, or of a format that this one does not know: {found}"
    for words in (["show"], ["eval"], ["resume"], ["export", "--out", finished.path.parent / "out"], ["predict"]):
        assert line in error_line(mezo(words[0], finished.path, *words[1:]))
    for words in (["runs"], ["compare"], ["report", "--out", finished.path.parent / "page.html"]):
        said = mezo(words[0], finished.path.parent, *words[1:])
        assert "before 1.0" in " ".join((said.out + said.err).split()), said
    assert {path.name for path in finished.path.iterdir()} == before


CONFIG = build_config(["steps=20", "eval_every=5", "log_every=2"])
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
