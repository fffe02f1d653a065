"""Ranks that lose their weights, die or hang: what the others do, and how the run goes on."""

import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli import data, models, system
from mezo_cli.runs import Run
from mezo_cli.training.session import Session
from tests import tiny
from tests.command_line import error_line, mezo, small
from tests.distributed.test_ranks import EACH, files
from tests.ranks import run_ranks

DIRECTIONS = (*EACH, "optimizer.samples=2")


pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module")
def alone(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, and its data beside it."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        words = small(roberta, tiny.movie_folder(folder / "movies"), folder / "run", *DIRECTIONS)
        assert mezo("train", *words).code == 0
    return folder / "run"


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
    """Change one weight."""
    with torch.no_grad():
        next(iter(session.params.tensors.values())).view(-1)[5] += 1.0


def kill(session: Session) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang(session: Session) -> None:
    """Wait for longer than the timeout of the test."""
    time.sleep(12)


def fail(session: Session) -> None:
    """Fail by a defect."""
    raise ValueError("a defect")


@pytest.mark.slow
def test_weights_that_differ_are_rebuilt(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = ["train", *small(roberta, movies, tmp_path / "run", *DIRECTIONS, "optimizer=mezo_momentum")]
    results = run_ranks(words, words, prepare=partial(after, 1, damage, 1))
    assert [result.code for result in results] == [0, 0], results
    assert results[0].out.count("the weights of rank 1 differ from rank 0's") == 1
    replayed = mezo("replay", tmp_path / "run", "--step", 6, "--out", tmp_path / "out")
    assert replayed.code == 0, replayed
    last = tmp_path / "run" / "checkpoints" / "last" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == last.read_bytes()


@pytest.mark.slow
def test_a_run_whose_rank_has_failed_goes_on_alone(roberta: Path, alone: Path, tmp_path: Path) -> None:
    movies = alone.parent / "movies"
    words = ["train", *small(roberta, movies, tmp_path / "run", *DIRECTIONS)]
    results = run_ranks(words, words, prepare=partial(after, 3, fail, 1))
    assert [result.code for result in results] == [1, 1], results
    assert results[0].err == "error: rank 1: ValueError: a defect\n"
    assert Run(tmp_path / "run").info()["error"] == "rank 1: ValueError: a defect"
    assert "rank 1: ValueError: a defect" in (tmp_path / "run" / "train.log").read_text()
    assert mezo("resume", tmp_path / "run").code == 0
    assert files(tmp_path / "run") == files(alone)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(roberta: Path, alone: Path, tmp_path: Path, rank: int) -> None:
    words = ["train", *small(roberta, alone.parent / "movies", tmp_path / "run", *DIRECTIONS)]
    began = time.monotonic()
    results = run_ranks(words, words, prepare=partial(after, 3, kill, rank))
    assert time.monotonic() - began < 100
    assert results[rank].code == -signal.SIGKILL
    assert results[1 - rank].code == 1
    run = Run(tmp_path / "run")
    assert run.status() == ("failed" if rank == 1 else "interrupted")
    if rank == 1:
        assert re.match("error: rank 1 ended: ", results[0].err)
    if rank == 0:  # as torchrun --max-restarts does
        results = run_ranks(words, words, TORCHELASTIC_RESTART_COUNT="1", TORCHELASTIC_MAX_RESTARTS="1")
    else:
        results = run_ranks(*[["resume", tmp_path / "run"]] * 2)
    assert [result.code for result in results] == [0, 0], results
    assert files(tmp_path / "run") == files(alone)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_within_the_timeout(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = ["train", *small(roberta, movies, tmp_path / "run", *DIRECTIONS, "distributed.timeout=5")]
    results = run_ranks(words, words, prepare=partial(after, 3, hang, 1))
    assert [result.code for result in results] == [1, 1], results
    assert results[0].err == "error: rank 1 did not answer within distributed.timeout=5 s\n"
    assert Run(tmp_path / "run").status() == "failed"


@pytest.mark.slow
def test_mistakes_end_in_one_line_of_rank_0(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = ["train", *small(roberta, movies, tmp_path / "run")]
    for more, part in (
        (["optimizer=adamw"], "optimizer=adamw: 2 ranks were started"),
        (["batch_size=1"], "batch_size=1 is less than 2 ranks"),
        (["distributed.split=directions"], "a step has 1 direction, fewer than 2 ranks"),
    ):
        results = run_ranks([*words, *more], [*words, *more])
        assert [result.code for result in results] == [2, 2]
        assert part in error_line(results[0])
        assert not (tmp_path / "run").exists()
    words = ["train", "experiment=demo-reward", f"hydra.run.dir={tmp_path / 'run'}"]
    part = "objective.loss=reward: a step has 1 direction, fewer than 2 ranks"
    assert part in error_line(run_ranks(words, words)[0])


def another_code(rank: int) -> None:
    """Let rank 1 have other source files."""
    if rank == 1:
        system.source_digest = lambda: "0" * 64


def other_weights(rank: int) -> None:
    """Let rank 1 have another weight in its model files."""
    if rank == 1:
        before = models.load

        def load(*args: Any, **options: Any) -> Any:
            loaded = before(*args, **options)
            with torch.no_grad():
                next(loaded.model.parameters()).view(-1)[5] += 1.0
            return loaded

        models.load = load


def other_data(rank: int) -> None:
    """Let rank 1 have one row less."""
    if rank == 1:
        before = data.load_splits

        def load(config: Any) -> Any:
            return dataclasses.replace(before(config), fingerprint="0" * 64)

        data.load_splits = load


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "part"),
    [
        (another_code, "rank 1 has another version than rank 0: source files with sha256 0000000000000000"),
        (other_data, "rank 1 has another set of rows than rank 0: rows of sha256 0000000000000000"),
        (other_weights, "rank 1 has another model than rank 0: model.path="),
    ],
)
def test_ranks_that_differ_are_refused(roberta: Path, movies: Path, tmp_path: Path, change: Any, part: str) -> None:
    words = ["train", *small(roberta, movies, tmp_path / "run")]
    results = run_ranks(words, words, prepare=change)
    assert [result.code for result in results] == [2, 2], results
    assert part in error_line(results[0])
    assert not (tmp_path / "run" / "trajectory.bin").exists()
