"""A small campaign of each kind; `scripts/campaign.py` runs the large one (docs/concepts/reliability.md)."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaign import flips, mistakes, power_cut, stops
from tests.campaign.cases import CASES, SMALL, Job, Lab, build
from tests.campaign.power_cut import disk_after

SEED = 1


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return build(tmp_path_factory.mktemp("lab"), SMALL)


def check(jobs: Sequence[Job], folder: Path) -> None:
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


@pytest.mark.slow
def test_the_harness_sees_every_file_that_a_run_writes(lab: Lab, tmp_path: Path) -> None:
    """Replaying the recorded operations gives the run directory back, byte for byte."""
    for case in SMALL:
        disk_after(lab.log[case]).cut(tmp_path / case, ("all", "all"), random.Random(0))
        run = lab.finished(case)
        found, recorded = (
            {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}
            for folder in (tmp_path / case, run)
        )
        assert found == recorded
