"""The jobs of a sweep: counted, and composed and validated before the first one starts."""

from functools import partial

import pytest

from mezo_cli.sweep.plan import plan_sweep
from tests.config import refused

pytestmark = pytest.mark.usefixtures("composing_all")

error_of = partial(refused.error_of, compose=plan_sweep)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("steps=1,ten", "steps=ten: allowed is a whole number"),
        ("seed=range(3,1)", "names no value"),
        ("task=glob(x*)", "names no value"),
    ],
)
def test_a_sweep_is_checked_whole(word: str, part: str) -> None:
    assert part in error_of("batch_size=8", word, "seed=1,2" if "seed" not in word else "steps=1")


def test_a_sweep_counts_its_jobs() -> None:
    for words, count in ((["task=sst2,rte", "seed=13,42,87"], 6), (["task=glob(sst*)", "seed=range(0,2)"], 4), ([], 1)):
        assert len(plan_sweep(["steps=1", *words]).jobs) == count


def test_pairs_are_validated_too() -> None:
    line = error_of("optimizer=mezo,adamw", "objective.loss=cross_entropy,accuracy")
    assert line.startswith("job 4 of 4 (optimizer=adamw objective.loss=accuracy): objective.loss=accuracy: it has no ")


def test_too_many_jobs_are_refused() -> None:
    assert "at most 100,000" in error_of("seed=range(0,1000)", "steps=range(0,1000)")
    assert "at most 100,000" in error_of("seed=range(0,1000000000)")


def test_directories_share_one_time() -> None:
    plan = plan_sweep(["task=sst2,rte", "hydra.sweep.subdir=${now:%f}-${mezo_unique:}-${hydra:job.num}"])
    first, second = [job.directory.name for job in plan.jobs or ()]
    assert (first[-2:], second[-2:]) == ("-0", "-1")
    assert first[:-2] == second[:-2]
