"""`mezo runs`: the scores of the checkpoint that was picked, and damaged runs by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mezo_cli.runs import Run
from tests.command_line import Result, mezo, small

RUNS = Path(__file__).resolve().parents[1] / "fixtures" / "runs"


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")


def rows(result: Result) -> dict[str, list[str]]:
    """Return the cells of each run."""
    assert result.code == 0, result
    return {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line.strip()}


def test_the_scores_are_those_of_the_metric_that_picked_the_checkpoint(
    roberta: Path, movies: Path, tmp_path: Path
) -> None:
    words = small(roberta, movies, tmp_path / "run", "task.metric=matthews", "eval_every=1", "data.train_size=8")
    trained = mezo("train", *words)
    assert trained.code == 0, trained
    run = Run(tmp_path / "run")
    summary = run.read_summary()
    dev, test = (f"{100 * summary[split]['matthews']:.1f}" for split in ("dev", "test"))
    assert rows(mezo("runs", tmp_path))["run"][-5:] == ["matthews", "42", "6/6", dev, test]
    assert f"{100 * summary['dev']['accuracy']:.1f}" != dev
    closing = trained.out[trained.out.index("matthews  accuracy    loss  at step") :].splitlines()
    best = run.evaluations("dev")[[m["step"] for m in run.evaluations("dev")].index(summary["best"]["step"])]
    score, accuracy, loss = f"{best['matthews']:.3f}", f"{100 * best['accuracy']:.1f}%", f"{best['loss']:.4f}"
    assert closing[2].split() == ["dev", "best", score, accuracy, loss, str(summary["best"]["step"])]


def test_before_the_end_it_is_the_best_so_far(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "mezo-interrupted", tmp_path / "run")
    best = max(line["accuracy"] for line in Run(tmp_path / "run").evaluations("dev"))
    assert rows(mezo("runs", tmp_path))["run"][-2:] == [f"{100 * best:.1f}", "-"]


def cut_lines(path: Path, number: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-number]))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "config edited": (lambda run: (run / "config.yaml").write_text("steps: 2\n"), "config.yaml"),
    "metrics deleted": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl"),
    "metrics emptied": (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl"),
    "metrics cut by a line": (lambda run: cut_lines(run / "metrics.jsonl", 1), "metrics.jsonl"),
    "metrics cut by bytes": (
        lambda run: (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:-9]),
        "metrics.jsonl",
    ),
    "summary deleted": (lambda run: (run / "summary.json").unlink(), "summary.json"),
    "run.json deleted": (lambda run: (run / "run.json").unlink(), "run.json"),
    "as adamw, run.json deleted": (
        lambda run: [(run / name).unlink() for name in ("run.json", "trajectory.bin")],
        "run.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_finished_run_is_named(name: str, tmp_path: Path) -> None:
    damage, file = DAMAGES[name]
    for run in ("sound", "torn"):
        shutil.copytree(RUNS / "mezo", tmp_path / run)
    damage(tmp_path / "torn")
    result = mezo("runs", tmp_path)
    assert rows(result)["torn"] == ["damaged"]
    assert rows(result)["sound"][0] == "finished"
    assert result.out.splitlines()[-1].startswith("torn: ")
    assert f"torn/{file}" in result.out.splitlines()[-1]


@pytest.mark.parametrize("lost", ["train", "eval"])
def test_an_interrupted_run_that_lost_a_line_is_named(lost: str, tmp_path: Path) -> None:
    """A power cut can lose the end of metrics.jsonl and keep the trajectory's records after it."""
    shutil.copytree(RUNS / "mezo-interrupted", tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    assert rows(mezo("runs", tmp_path))["run"][0] == "interrupted"
    assert mezo("runs", tmp_path).out.count("\n") == 2
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    cut_lines(path, len(kinds) - max(i for i, kind in enumerate(kinds) if kind == lost))
    result = mezo("runs", tmp_path)
    assert rows(result)["run"][0] == "interrupted"
    assert "metrics.jsonl lacks the" in result.out.splitlines()[-1]


def test_a_config_alone_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("task:\n")
    (tmp_path / "begun" / "train.log").write_text("")
    assert mezo("runs", tmp_path).out == f"no runs under {tmp_path}\n"
