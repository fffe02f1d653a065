"""A small campaign of each kind; `make campaign` runs the large one (docs/concepts/reliability.md)."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaign import flips, mistakes, power_cut, stops
from tests.campaign.cases import CASES, SMALL, Job, Lab, build
from tests.campaign.power_cut import Folder, disk_after, promised

SEED = 1


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The runs that are damaged."""
    return build(tmp_path_factory.mktemp("lab"), SMALL)


def check(jobs: Sequence[Job], folder: Path) -> None:
    """Run every job, then name those that failed."""
    fell = []
    for number, job in enumerate(jobs):
        (folder / str(number)).mkdir()
        case, wrong = job(folder / str(number))
        if wrong:
            fell.append(f"{case}\n    {wrong}")
    assert not fell, "\n".join(fell)


def test_kills_a_full_disk_and_mistakes(lab: Lab, tmp_path: Path) -> None:
    check([*stops.kills(lab, SEED, 2), *stops.full_disks(lab, SEED, 2), *mistakes.jobs(lab, SEED, 2)], tmp_path)


@pytest.mark.slow
def test_power_cuts_and_all_mistakes(lab: Lab, tmp_path: Path) -> None:
    check([*power_cut.jobs(lab, SEED, 3), *mistakes.jobs(lab, SEED, 0)], tmp_path)


@pytest.mark.slow
def test_kills_and_flips_of_every_kind_of_run(tmp_path: Path) -> None:
    lab = build(tmp_path / "lab", tuple(CASES))
    check([*stops.kills(lab, SEED, 12), *flips.jobs(lab, SEED, 60), *stops.two_at_once(lab, SEED, 6)], tmp_path)


# --- the harness itself ---


def test_the_disk_keeps_what_was_synced_and_no_more(tmp_path: Path) -> None:
    disk, number = Folder(), itertools.count()

    def after(names: str, data: str) -> dict[str, bytes]:
        folder = tmp_path / str(next(number))
        disk.cut(folder, (names, data), random.Random(0))
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
        disk_after(lab.log[case]).cut(tmp_path / case, ("all", "all"), random.Random(0))
        run = lab.finished(case)
        assert {p.relative_to(tmp_path / case) for p in (tmp_path / case).rglob("*")} == {
            p.relative_to(run) for p in run.rglob("*")
        }
        for path in run.rglob("*"):
            assert path.is_dir() or path.read_bytes() == (tmp_path / case / path.relative_to(run)).read_bytes()
