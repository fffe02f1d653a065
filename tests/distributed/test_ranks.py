"""Ranks that share a run: what it ends in, what is exchanged, who writes and prints."""

import json
from pathlib import Path

import pytest

from mezo_cli.runs import Run
from tests.command_line import Result, error_line, mezo, small
from tests.ranks import run_ranks

EACH = ("log_every=1",)


pytestmark = pytest.mark.usefixtures("eager_kernels")


def files(run: Path) -> dict[str, bytes]:
    """Return the trajectory, the weights and the predictions of a run."""
    paths = [run / "trajectory.bin", run / "predictions.jsonl", *run.glob("checkpoints/*/model.safetensors")]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def losses(run: Path) -> list[float]:
    """Return every loss in metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "loss_plus", "loss_minus") if key in line]


def check(results: list[Result]) -> None:
    """Check that all ranks ended well, and that rank 0 alone has printed."""
    assert [result.code for result in results] == [0] * len(results), results
    assert "evaluate again" in results[0].out
    assert [(result.out, result.err) for result in results[1:]] == [("", "")] * (len(results) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "exchanged"),
    [
        (["optimizer=mezo_momentum", "optimizer.samples=3"], 3 * 16),
        (["optimizer=fzoo", "optimizer.members=4"], 4 * 8 + 8),
        (["optimizer=es", "optimizer.members=5", "optimizer.shaping_std=rows", "batch_size=11"], 5 * 16),
        (["optimizer=es", "optimizer.members=6", "optimizer.antithetic=true", "optimizer.anchor={l2: 10}"], 3 * 16),
    ],
    ids=str,
)
def test_directions_end_in_the_bits_of_one_process(
    optimizer: list[str], exchanged: int, roberta: Path, movies: Path, tmp_path: Path
) -> None:
    words = [*EACH, "eval_batch_size=4", *optimizer]
    assert mezo("train", *small(roberta, movies, tmp_path / "one", *words)).code == 0
    two = ["train", *small(roberta, movies, tmp_path / "two", *words)]
    check(run_ranks(two, two))
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    shared = Run(tmp_path / "two").read_summary()["distributed"]
    assert shared == {"ranks": 2, "split": "directions", "bytes_per_step": exchanged}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "f1"])
def test_rows_agree_with_one_process(roberta: Path, movies: Path, tmp_path: Path, loss: str) -> None:
    words = [*EACH, f"objective.loss={loss}", "batch_size=7", "micro_batch_size=2", "optimizer.lr=1e-3"]
    assert mezo("train", *small(roberta, movies, tmp_path / "one", *words)).code == 0
    two = ["train", *small(roberta, movies, tmp_path / "two", *words)]
    check(run_ranks(two, two))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    exchanged = {"cross_entropy": 7 * 16, "f1": 2 * 2 * 4 * 8}[
        loss
    ]  # of each rank and sign: rows per label and prediction
    shared = Run(tmp_path / "two").read_summary()["distributed"]
    assert shared == {"ranks": 2, "split": "rows", "bytes_per_step": exchanged}


def test_a_rank_with_another_config_is_named(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = ["train", *small(roberta, movies, tmp_path / "run")]
    results = run_ranks(words, [*words, "optimizer.eps=1e-2"])
    assert [result.code for result in results] == [2, 2]
    assert "rank 1 has another config than rank 0: eps: 0.01; rank 0 has eps: 0.001" in error_line(results[0])
    assert not (tmp_path / "run").exists()


def test_an_error_of_another_rank_is_rank_0s_line(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = ["train", *small(roberta, movies, tmp_path / "run")]
    results = run_ranks(words, [*words, "data.shots=many"])
    assert [result.code for result in results] == [2, 2]
    assert "error: rank 1: data.shots=many: " in error_line(results[0])
    assert results[1].err == ""


@pytest.mark.slow
def test_evaluation_and_prediction_are_shared(roberta: Path, movies: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert mezo("train", *small(roberta, movies, run, "steps=0", "eval_batch_size=5")).code == 0
    for words in (["eval", run, "--json", "-q"], ["predict", run, "--file", movies / "test.jsonl", "--json", "-q"]):
        alone, shared = mezo(*words), run_ranks(words, words)
        assert [result.code for result in shared] == [0, 0], shared
        assert json.loads(shared[0].out) == json.loads(alone.out)
        assert (shared[1].out, shared[1].err) == ("", "")
    results = run_ranks(["predict", run], ["predict", run])
    assert [result.code for result in results] == [2, 2]
    assert "one process reads it: give --text or --file" in error_line(results[0])
