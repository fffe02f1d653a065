"""A finished run: every flipped bit of a file is told or has no effect, and so is what is lost, added or edited."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import to_yaml
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, checkpoints, trajectory
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
def run(tmp_path: Path) -> Run:
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
def test_every_flipped_bit_is_told_or_changes_nothing(run: Run, name: str) -> None:
    path, told = run.path / name, []
    whole, before = path.read_bytes(), READ[name](run)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            assert READ[name](run) == before
        except UserError as error:
            told.append(str(error))
    assert len(told) > 0.85 * len(whole)  # not all of `seconds`
    assert all(text.startswith(str(path if name != "run.json" else run.path)) for text in told)
    path.unlink()
    if name not in ("metrics.jsonl", "predictions.jsonl"):
        with pytest.raises(UserError, match=r"no such file|missing|cannot be read|holds no run"):
            READ[name](run)


def test_predictions_are_read_as_they_were_written_once_the_run_has_finished(run: Run) -> None:
    assert run.predictions() == [{"row": number, **row} for number, row in enumerate(ROWS)]
    (run.path / "summary.json").unlink()
    assert run.predictions() is None  # another try may end elsewhere


@pytest.mark.parametrize("kept", [[0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 2, 3, 3]])
def test_lost_predictions_are_noticed(run: Run, kept: list[int]) -> None:
    file = run.path / "predictions.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[number] for number in kept))
    with pytest.raises(UserError, match=r"predictions\.jsonl.* is damaged"):
        run.predictions()


@pytest.mark.parametrize("found", [None, 2])
def test_a_run_of_another_format_is_refused_and_left_out_of_lists_by_name(run: Run, found: int | None) -> None:
    """A version before 1.0 wrote no format."""
    values = {key: value for key, value in run.info().items() if key != "format"}
    (run.path / "run.json").write_text(json.dumps(add_checksum({**values, "format": found})))
    before = {path.name for path in run.path.iterdir()}
    line = f"{run.path}: of a version of mezo before 1.0, or of a format that this one does not know: {found}"
    for words in (["show"], ["eval"], ["resume"], ["export", "--out", run.path.parent / "out"], ["predict"]):
        assert line in error_line(mezo(words[0], run.path, *words[1:]))
    for words in (["runs"], ["compare"], ["report", "--out", run.path.parent / "page.html"]):
        said = mezo(words[0], run.path.parent, *words[1:])
        assert "before 1.0" in " ".join((said.out + said.err).split()), said
    assert {path.name for path in run.path.iterdir()} == before
