"""mezo verify: what a run claims follows from the base model and its trajectory, here and on another machine."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mezo_cli.runs import Run, trajectory
from tests import tiny
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
    (here,) = run.info()["arithmetic"]
    run.update(arithmetic=[here, {**here, "from_step": 3, "CPU capability": "another"}])  # it went on there


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda run: None, []),
        (other_cpu, []),
        (other_prediction, ["test"]),
        (other_score, ["dev"]),
        (other_step, ["weights", "dev", "test", "last"]),
    ],
)
def test_what_was_changed_is_found(change: Callable[[Run], None], differing: list[str], run: Path) -> None:
    change(Run(run))
    if change in (other_prediction, other_score):  # a file with another end is no run's result
        assert "is not what run.json says that this run has written" in error_line(mezo("verify", run))
    Run(run).update(ends=Run(run).ends())
    ended = mezo("verify", run)
    lines = [line.split(maxsplit=2) for line in ended.out.splitlines()]
    assert [line[1] for line in lines] == ["data", "weights", "dev", "test", "last"]
    assert {line[1] for line in lines if line[0] == "DIFFERS"} >= set(differing[:1])
    assert {line[1] for line in lines if line[0] == "DIFFERS"} <= set(differing)
    assert ended.code == (1 if differing else 0)
    rule = (
        "[loss to 0.0001, 1 prediction in 200 may differ: other CPU capability]" if change is other_cpu else "[exact]"
    )
    assert all(line[2].endswith(rule) for line in lines[2:4])


def test_the_last_weights_are_checked(run: Path) -> None:
    """Where step 0 was picked, nothing else would be replayed."""
    made = Run(run)
    weights = made.info()["weights"]
    last = f"last     step 6, sha256 {weights['last']['sha256'][:12]}, as recorded; 6 of 6 steps replayed"
    assert mezo("verify", run).out.splitlines()[-1] == f"ok      {last}"
    made.update(weights={**weights, "last": {"step": 6, "sha256": "0" * 64}})
    ended = mezo("verify", run)
    assert (ended.code, ended.out.splitlines()[-1].split()[0]) == (1, "DIFFERS")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["steps=5"], "'steps=5': only a plain model folder takes settings"),
        (["foo"], "'foo': only"),
        (["+data.dir=x"], "'+data.dir=x': only"),
        (["steps=5", "data.dir=x"], "'steps=5': only"),
        (["objective.reward=exact_match"], "'objective.reward=exact_match': only"),
        (["--base", "OTHER"], "started from other weights than these"),
    ],
)
def test_what_it_does_not_read_is_refused(words: list[str], part: str, run: Path, tmp_path: Path) -> None:
    other = tiny.roberta(tmp_path / "other", seed=1)
    words = [str(other) if word == "OTHER" else word for word in words]
    for command in (["verify", run], ["eval", run], ["export", run, "--out", tmp_path / "out"]):
        if command[0] != "export" or words[0] == "--base":
            assert part in error_line(mezo(*command, *words)), command
    assert not (tmp_path / "out").exists()


def test_another_persons_run_is_verified_from_the_base(run: Path, roberta: Path, movies: Path, tmp_path: Path) -> None:
    assert mezo("export", run, "--trajectory", "--out", tmp_path / "shared").code == 0
    ended = mezo("verify", tmp_path / "shared", "--base", roberta, f"data.dir={movies}")
    assert ended.code == 0
    assert [line.split()[:2] for line in ended.out.splitlines()] == [
        ["ok", x] for x in ("data", "weights", "dev", "test", "last")
    ]
