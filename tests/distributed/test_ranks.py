"""Ranks that share a run: how they are launched, what it ends in, what the others do when one fails."""

import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mezo_cli import data, models
from mezo_cli.config.compose import build_config
from mezo_cli.distributed.launch import read_launch
from mezo_cli.distributed.ranks import Ranks, split_sizes
from mezo_cli.errors import UserError
from mezo_cli.process import versions
from mezo_cli.runs import Run
from mezo_cli.session.opening import prepare
from mezo_cli.session.session import Session
from tests import tiny
from tests.command_line import Result, error_line, finished_runs, mezo, small
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("eager_kernels")

MET = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be rank 0 of 2."""
    for name, value in MET.items():
        monkeypatch.setenv(name, value)


def test_a_process_by_itself_is_no_rank() -> None:
    assert read_launch({}) is None
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"RANK": "2"}, "RANK=2: with WORLD_SIZE=2 it is a number from 0 to 1"),
    ],
)
def test_variables_that_are_wrong_are_named(changed: dict[str, str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        read_launch(MET | changed)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_everything_once_and_in_order(count: int, size: int) -> None:
    shares = [Ranks(rank, size, None).share_of(range(count)) for rank in range(size)]
    assert [one for share in shares for one in share] == list(range(count))
    assert [len(share) for share in shares] == split_sizes(count, size)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("words", ["runs", "doctor", "data", "env", "train -m seed=1,2"])
def test_ranks_cannot_share_every_command(two_ranks: None, words: str) -> None:
    assert f"mezo {words.removesuffix(' seed=1,2')}: 2 ranks were started" in error_line(mezo(*words.split()))


def test_restarts_are_refused(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert "torchrun --max-restarts" in error_line(mezo("train"))


def test_other_ranks_of_torchrun_let_rank_0_end_first(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that ends with an error brings SIGTERM to the others: rank 0 could not print its line."""
    waited: list[float] = []
    monkeypatch.setattr("mezo_cli.distributed.launch.time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setenv("RANK", "1")
    result = mezo("runs")
    assert (result.code, result.out, result.err) == (2, "", "")
    assert waited == []  # srun ends no rank because of another
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    for words in (["runs"], ["train", "--help"], ["train", "-m", "seed=1,2"]):
        mezo(*words)
    assert waited == [10.0, 10.0]  # not for --help
    monkeypatch.setenv("RANK", "0")
    assert "2 ranks were started" in error_line(mezo("runs"))
    assert waited == [10.0, 10.0]


def test_fewer_rows_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SimpleNamespace(split="rows", size=65, check_same=lambda what, text: None)
    monkeypatch.setattr("mezo_cli.session.opening.current", SimpleNamespace(get=lambda: ranks))
    with pytest.raises(UserError, match="a step has 64 rows, fewer than 65 ranks"):
        prepare(build_config(["data=demo"]), trains=True)


EACH = ("log_every=1",)
DIRECTIONS = (*EACH, "optimizer.samples=2")


def files(run: Path) -> dict[str, bytes]:
    """Return the trajectory, the weights and the predictions of a run."""
    paths = [run / "trajectory.bin", run / "predictions.jsonl", *run.glob("checkpoints/*/model.safetensors")]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "loss_plus", "loss_minus") if key in line]


def train(model: Path, movies: Path, run: Path, *words: str, **how: Any) -> list[Result]:
    of_each = ["train", *small(model, movies, run, *words)]
    return run_ranks(of_each, of_each, **how)


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
        (["model.dtype=float16", "model.compute_dtype=float16", "optimizer.samples=2"], 2 * 16),
        (["optimizer=fzoo", "optimizer.members=4"], 4 * 8 + 8),
        (["optimizer=es", "optimizer.members=5", "optimizer.shaping_std=rows", "batch_size=11"], 5 * 16),
        (["optimizer=es", "optimizer.members=6", "optimizer.antithetic=true", "optimizer.anchor={l2: 10}"], 3 * 16),
    ],
    ids=str,
)
def test_directions_as_alone(optimizer: list[str], exchanged: int, roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = [*EACH, "eval_batch_size=4", *optimizer]
    assert mezo("train", *small(roberta, movies, tmp_path / "one", *words)).code == 0
    check(train(roberta, movies, tmp_path / "two", *words))
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    shared = Run(tmp_path / "two").read_summary()["distributed"]
    assert shared == {"ranks": 2, "split": "directions", "bytes_per_step": exchanged}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "f1"])
def test_rows_agree_with_one_process(roberta: Path, movies: Path, tmp_path: Path, loss: str) -> None:
    words = [*EACH, f"objective.loss={loss}", "batch_size=7", "micro_batch_size=2", "optimizer.lr=1e-3"]
    assert mezo("train", *small(roberta, movies, tmp_path / "one", *words)).code == 0
    check(train(roberta, movies, tmp_path / "two", *words))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    exchanged = 7 * 16 if loss == "cross_entropy" else 2 * 2 * 4 * 8  # of rank and sign: rows per label and prediction
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


@pytest.fixture(scope="module")
def alone(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, and its data beside it."""
    folder = tmp_path_factory.mktemp("alone")
    return finished_runs(folder, roberta, tiny.movie_folder(folder / "movies"), {"run": DIRECTIONS}) / "run"


def after(step: int, act: Callable[[Session], None], of_rank: int, rank: int) -> None:
    """Call `act` with the session of one rank after a step."""
    before = Session.step

    def wrapped(session: Session, rows: Any, at: int, weights: Any = None) -> Any:
        result = before(session, rows, at, weights)
        if at == step:
            act(session)
        return result

    if rank == of_rank:
        Session.step = wrapped  # type: ignore[method-assign]


def damage(session: Session) -> None:
    with torch.no_grad():
        next(iter(session.params.tensors.values())).view(-1)[5] += 1.0


def kill(session: Session) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(session: Session) -> None:
    """Wait for longer than the timeout of the test."""
    time.sleep(12)


def fail(session: Session) -> None:
    raise ValueError("a defect")


@pytest.mark.slow
def test_weights_that_differ_end_the_run(roberta: Path, movies: Path, tmp_path: Path) -> None:
    damaged = partial(after, 1, damage, 1)
    results = train(roberta, movies, tmp_path / "run", *DIRECTIONS, "optimizer=mezo_momentum", prepare=damaged)
    assert [result.code for result in results] == [1, 1], results
    assert re.match(r"error: (rank 1: )?rank 1 has another model at step 3 than rank 0: ", results[0].err), results


@pytest.mark.slow
def test_a_run_whose_rank_has_failed_goes_on_alone(roberta: Path, alone: Path, tmp_path: Path) -> None:
    movies = alone.parent / "movies"
    results = train(roberta, movies, tmp_path / "run", *DIRECTIONS, prepare=partial(after, 3, fail, 1))
    assert [result.code for result in results] == [1, 1], results
    assert results[0].err == "error: rank 1: ValueError: a defect\n"
    assert Run(tmp_path / "run").info()["error"] == "rank 1: ValueError: a defect"
    assert "rank 1: ValueError: a defect" in (tmp_path / "run" / "train.log").read_text()
    assert mezo("resume", tmp_path / "run").code == 0
    assert files(tmp_path / "run") == files(alone)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(roberta: Path, alone: Path, tmp_path: Path, rank: int) -> None:
    movies = alone.parent / "movies"
    results = train(roberta, movies, tmp_path / "run", *DIRECTIONS, prepare=partial(after, 3, kill, rank))
    assert results[rank].code == -signal.SIGKILL
    assert results[1 - rank].code == 1
    run = Run(tmp_path / "run")
    assert run.status() == ("failed" if rank == 1 else "interrupted")
    if rank == 1:
        assert re.match("error: rank 1 ended: ", results[0].err)
    results = run_ranks(*[["resume", tmp_path / "run"]] * 2)
    assert [result.code for result in results] == [0, 0], results
    assert files(tmp_path / "run") == files(alone)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_within_the_timeout(roberta: Path, movies: Path, tmp_path: Path) -> None:
    hung = partial(after, 3, hang, 1)
    results = train(roberta, movies, tmp_path / "run", *DIRECTIONS, "distributed.timeout=5", prepare=hung)
    assert [result.code for result in results] == [1, 1], results
    assert results[0].err == "error: rank 1 did not answer within distributed.timeout=5 s\n"
    assert Run(tmp_path / "run").status() == "failed"


@pytest.mark.slow
def test_mistakes_end_in_one_line_of_rank_0(roberta: Path, movies: Path, tmp_path: Path) -> None:
    for word, part in (
        ("optimizer=adamw", "optimizer=adamw: 2 ranks were started"),
        ("batch_size=1", "batch_size=1 is less than 2 ranks"),
        ("distributed.split=directions", "a step has 1 direction, fewer than 2 ranks"),
    ):
        results = train(roberta, movies, tmp_path / "run", word)
        assert [result.code for result in results] == [2, 2]
        assert part in error_line(results[0])
        assert not (tmp_path / "run").exists()


def moved(loaded: models.LoadedModel) -> models.LoadedModel:
    """Change one weight of a model that was loaded."""
    with torch.no_grad():
        next(loaded.model.parameters()).view(-1)[5] += 1.0
    return loaded


def differ(what: str, rank: int) -> None:
    """Let rank 1 have other source files, another set of rows, or another weight in its model files."""
    load, load_splits = models.load, data.load_splits
    if rank == 1 and what == "version":
        versions.source_digest = lambda: "0" * 64
    elif rank == 1 and what == "rows":
        data.load_splits = lambda *what: dataclasses.replace(load_splits(*what), fingerprint="0" * 64)
    elif rank == 1:
        models.load = lambda *args, **options: moved(load(*args, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("version", "rank 1 has another version than rank 0: source files with sha256 0000000000000000"),
        ("rows", "rank 1 has another set of rows than rank 0: rows of sha256 0000000000000000"),
        ("model", "rank 1 has another model than rank 0: model.path="),
    ],
)
def test_ranks_that_differ_are_refused(roberta: Path, movies: Path, tmp_path: Path, change: str, part: str) -> None:
    results = train(roberta, movies, tmp_path / "run", prepare=partial(differ, change))
    assert [result.code for result in results] == [2, 2], results
    assert part in error_line(results[0])
    assert not (tmp_path / "run" / "trajectory.bin").exists()
