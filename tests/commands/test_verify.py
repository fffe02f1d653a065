"""mezo verify: what a run claims follows from the base model and its trajectory, here and on another machine."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mezo_cli.runs import Run, trajectory
from tests.command_line import error_line, mezo, small

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture
def run(roberta: Path, movies: Path, tmp_path: Path) -> Path:
    assert mezo("train", *small(roberta, movies, tmp_path / "run", "steps=6", "eval_every=2")).code == 0
    return tmp_path / "run"


def other_prediction(run: Run) -> None:
    rows = run.predictions() or []
    first, other = rows[0], next(row for row in rows if row["predicted"] != rows[0]["predicted"])
    first["predicted"], other["predicted"] = other["predicted"], first["predicted"]
    run.write_predictions({key: row[key] for key in row if key != "row"} for row in rows)


def other_score(run: Run) -> None:
    summary = run.read_summary()
    summary["dev"]["accuracy"] += 0.25
    run.write_summary(summary)


def other_step(run: Run) -> None:
    past = trajectory.read(run.trajectory)
    with run.open_trajectory() as file:
        writer = trajectory.Writer(file, past.header)
        for step, grads, lr in past.records(0, len(past)):
            writer.append(step, [2 * g for g in grads] if step == 0 else grads, lr)


def other_cpu(run: Run) -> None:
    run.update(arithmetic={**run.info()["arithmetic"], "CPU capability": "another"})


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda run: None, []),
        (other_cpu, []),
        (other_prediction, ["test"]),
        (other_score, ["dev"]),
        (other_step, ["weights", "dev", "test"]),
    ],
)
def test_what_was_changed_is_found(change: Callable[[Run], None], differing: list[str], run: Path) -> None:
    change(Run(run))
    ended = mezo("verify", run)
    lines = [line.split(maxsplit=2) for line in ended.out.splitlines()]
    assert [line[1] for line in lines] == ["data", "weights", "dev", "test"]
    assert {line[1] for line in lines if line[0] == "DIFFERS"} >= set(differing[:1])
    assert {line[1] for line in lines if line[0] == "DIFFERS"} <= set(differing)
    assert ended.code == (1 if differing else 0)
    rule = (
        "[loss to 0.0001, 1 prediction in 200 may differ: other CPU capability]" if change is other_cpu else "[exact]"
    )
    assert all(line[2].endswith(rule) for line in lines[2:])


def test_the_run_of_somebody_else_is_verified_from_the_base_model(
    run: Path, roberta: Path, movies: Path, tmp_path: Path
) -> None:
    assert mezo("export", run, "--trajectory", "--out", tmp_path / "shared").code == 0
    ended = mezo("verify", tmp_path / "shared", "--base", roberta, f"data.dir={movies}")
    assert ended.code == 0
    assert [line.split()[:2] for line in ended.out.splitlines()] == [
        ["ok", x] for x in ("data", "weights", "dev", "test")
    ]


def test_a_method_without_a_trajectory_is_refused(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = small(roberta, movies, tmp_path / "run", "steps=2", "optimizer=adamw", "optimizer.lr=1e-4")
    assert mezo("train", *words).code == 0
    assert "optimizer=adamw writes no trajectory" in error_line(mezo("verify", tmp_path / "run"))
