"""A small campaign of each kind; `make campaign` runs the large one (docs/concepts/reliability.md)."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.campaign import flips, full_disk, kills, mistakes, power_cut, twice
from tests.campaign.cases import CASES, SMALL, Job, Lab, build
from tests.campaign.power_cut import Disk, promised
from tests.campaign.server import ForkServer

SEED = 1


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A server that forks a child for each command."""
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def lab(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The runs that are damaged."""
    return build(server, tmp_path_factory.mktemp("lab"), SMALL)


def check(jobs: Sequence[Job], server: ForkServer, folder: Path) -> None:
    """Run every job, then name those that failed."""
    fell = []
    for number, job in enumerate(jobs):
        (folder / str(number)).mkdir()
        outcome = job(server, folder / str(number))
        if not outcome.passed:
            fell.append(f"{outcome.case}\n    {outcome.what}")
    assert not fell, "\n".join(fell)


def test_a_killed_run_continues_bitwise_identical(lab: Lab, server: ForkServer, tmp_path: Path) -> None:
    check(kills.jobs(lab, SEED, 2), server, tmp_path)


def test_a_full_disk_is_one_line_and_loses_nothing(lab: Lab, server: ForkServer, tmp_path: Path) -> None:
    check(full_disk.jobs(lab, SEED, 2), server, tmp_path)


@pytest.mark.slow
def test_a_power_cut_loses_nothing_that_was_promised(lab: Lab, server: ForkServer, tmp_path: Path) -> None:
    check(power_cut.jobs(lab, SEED, 6), server, tmp_path)


def test_a_mistake_of_each_kind_is_one_line_and_leaves_nothing(lab: Lab, server: ForkServer, tmp_path: Path) -> None:
    check(mistakes.jobs(lab, SEED, each=1), server, tmp_path)


@pytest.mark.slow
def test_every_mistake_is_one_line_and_leaves_nothing(lab: Lab, server: ForkServer, tmp_path: Path) -> None:
    check(mistakes.jobs(lab, SEED), server, tmp_path)


@pytest.mark.slow
def test_kills_and_flips_of_every_kind_of_run(server: ForkServer, tmp_path: Path) -> None:
    lab = build(server, tmp_path / "lab", tuple(CASES))
    jobs = [*kills.jobs(lab, SEED, 24), *flips.jobs(lab, SEED, 120)]
    jobs += twice.jobs(lab, SEED, 12)
    check(jobs, server, tmp_path)


# --- the harness itself ---


def test_the_disk_keeps_what_was_synced_and_no_more(tmp_path: Path) -> None:
    disk, number = Disk(), itertools.count()

    def after(names: str, data: str) -> dict[str, bytes]:
        folder = tmp_path / str(next(number))
        disk.cut(folder, (names, data), power_cut.random.Random(0))
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    disk.do(("create", "a", None))
    disk.do(("write", "a", (0, b"one")))
    assert after("none", "all") == {}
    assert after("all", "none") == {"a": b""}
    assert after("all", "all") == {"a": b"one"}
    disk.do(("fsync", "a", None))
    assert after("none", "all") == {}
    assert after("all", "none") == {"a": b"one"}
    disk.do(("fsync", "", None))
    disk.do(("write", "a", (3, b"two")))
    assert after("none", "none") == {"a": b"one"}
    assert after("none", "all") == {"a": b"onetwo"}
    assert after("none", "zeros")["a"].startswith(b"one")
    assert len(after("none", "zeros")["a"]) == 6
    disk.do(("create", "b", None))
    disk.do(("rename", "b", "a"))
    assert after("none", "none") == {"a": b"one"}
    assert after("all", "none") == {"a": b""}


def test_an_evaluation_is_promised_once_the_run_goes_on() -> None:
    line = b'{"kind": "eval", "step": 3, "split": "dev"}\n'
    log: list[tuple[str, str, object]] = [("write", "metrics.jsonl", (0, line)), ("fsync", "metrics.jsonl", None)]
    assert promised(log) is None
    assert promised([*log, ("write", "trajectory.bin", (0, b"x"))]) == 3


@pytest.mark.slow
def test_the_harness_sees_every_file_that_a_run_writes(lab: Lab, tmp_path: Path) -> None:
    """Replaying the recorded operations gives the run directory back, byte for byte."""
    for case in SMALL:
        disk = Disk()
        for operation in lab.log[case]:
            disk.do(operation)
        disk.cut(tmp_path / case, ("all", "all"), power_cut.random.Random(0))
        run = lab.finished(case)
        assert {p.relative_to(tmp_path / case) for p in (tmp_path / case).rglob("*")} == {
            p.relative_to(run) for p in run.rglob("*")
        }
        for path in run.rglob("*"):
            assert path.is_dir() or path.read_bytes() == (tmp_path / case / path.relative_to(run)).read_bytes()
