"""A budget of forwards: its steps, its evaluations, its batches, and what is refused."""

import pytest

from mezo_cli.config.compose import build_config
from tests.config.refused import error_of

FZOO = "optimizer=fzoo"


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], 50),
        ([FZOO], 11),  # 9 forwards per step
        (["optimizer.samples=4"], 12),
        (["optimizer=es", "optimizer.members=10"], 10),
        (["optimizer=adamw"], 50),  # a forward and a backward
        (["optimizer.samples=5", "optimizer.sample_schedule=linear"], 17),
    ],
)
def test_the_most_steps_within_the_budget_are_taken(words: list[str], steps: int) -> None:
    config = build_config([*words, "forwards=100"])
    assert config.steps == steps
    assert config.calls(steps) <= 100
    more = build_config([*words, f"steps={steps + 1}"])
    assert more.calls(steps + 1) > 100


def test_dev_is_evaluated_after_the_first_step_at_or_past_a_number() -> None:
    config = build_config([FZOO, "forwards=100", "eval_at_forwards=[9,10,50,100]"])
    assert [step for step in range(12) if config.evaluates_at(step)] == [0, 1, 2, 6, 11]


def test_at_equal_forwards_every_method_stands_at_the_same_batch() -> None:
    mezo, fzoo = (build_config([*words, "forwards=100"]) for words in ([], [FZOO]))
    assert [mezo.batch_number(step) for step in range(4)] == [0, 1, 2, 3]
    assert [fzoo.batch_number(step) for step in range(4)] == [0, 4, 9, 13]
    assert build_config([FZOO, "steps=11"]).batch_number(3) == 3


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["forwards=100", "steps=3"], ["steps=3", "forwards=100", "forwards=null"]),
        (["forwards=5", FZOO], ["forwards=5", "9"]),
        (["forwards=10", "optimizer=linear_probe"], ["forwards=10", "linear_probe"]),
        (["forwards=100", "eval_at_forwards=[50,200]"], ["eval_at_forwards", "200", "100"]),
        (["forwards=100", "eval_at_forwards=[50]", "eval_every=5"], ["eval_every=5", "eval_at_forwards=[]"]),
        (["data.batches=balanced", "objective=generate", "task=demo-arithmetic"], ["data.batches", "generate"]),
        (["data.batches=balanced", "batch_size=1"], ["batch_size=1", "2"]),
        (["data.weights=none"], ["data.weights=none", "shuffled"]),
    ],
)
def test_what_cannot_act_together_is_refused(words: list[str], parts: list[str]) -> None:
    line = error_of(*words)
    assert all(part in line for part in parts), line
