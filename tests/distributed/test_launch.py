"""The variables that `torchrun` sets, and what is refused before ranks meet."""

from types import SimpleNamespace

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.distributed.launch import read_launch
from mezo_cli.distributed.ranks import Ranks, split_sizes
from mezo_cli.errors import UserError
from mezo_cli.session.opening import prepare
from tests.command_line import error_line, mezo

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
    monkeypatch.setattr("mezo_cli.session.opening.current", lambda: ranks)
    with pytest.raises(UserError, match="a step has 64 rows, fewer than 65 ranks"):
        prepare(build_config(["data=demo"]), trains=True)
