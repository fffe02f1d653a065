"""The jobs of a sweep: counted, and composed and validated before the first one starts."""

from functools import partial

import pytest

from mezo_cli.config.compose import build_config
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


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "words",
    [
        ["experiment=paper/zero_shot", "task=sst2,rte", "seed=1,2"],
        ["task=rte,sst2", "task.template='${task.name}{mask}'", "task.name=a,b", "optimizer.lr=1,2"],
        ["+task.rename.a=label", "task=rte,sst2", "seed=1,2"],
        ["optimizer=mezo,mezo_adam", "optimizer.lr=1e-3,2e-3", "optimizer.lr=5e-3", "data=files", "data.dir=a,'b c'"],
        ["task.hub.path=a,b", "task.hub={path: x}"],
        ["seed=1,2", "hydra.sweep.subdir=${hydra.job.override_dirname}"],
    ],
)
def test_each_job_is_what_hydra_composes_for_it(words: list[str]) -> None:
    for job in plan_sweep(words).jobs:
        assert job.config == build_config(job.overrides)


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
