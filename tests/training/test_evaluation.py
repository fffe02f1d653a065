"""Evaluation: independent of its batches, nan for logits that are not finite, scikit-learn's metrics, the best step."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import TokenizedExample
from mezo_cli.objectives.losses import f1_loss
from mezo_cli.training import evaluation
from mezo_cli.training import setup as sessions
from mezo_cli.training.evaluation import best_step, compute_score

pytestmark = pytest.mark.usefixtures("eager_kernels")


def test_an_evaluation_does_not_depend_on_its_batches(roberta: Path) -> None:
    made = build_config([f"model.path={roberta}", "data=demo", "objective=mlm"])
    session = sessions.prepare(made)
    rng = np.random.default_rng(0)
    rows = [
        TokenizedExample([0, *rng.integers(5, 80, size=n).tolist(), 4, 2], [0] * (n + 3), n + 1, n % 2)
        for n in range(3, 24)
    ]
    whole = evaluation.evaluate(session, rows)
    for size in (1, 4, 100):
        session.config = build_config([f"model.path={roberta}", "data=demo", f"eval_batch_size={size}"])
        seen = evaluation.evaluate(session, rows)
        assert seen.predicted == whole.predicted
        assert seen.loss == pytest.approx(whole.loss, rel=1e-5)
    logits = torch.cat([session.objective.logits(session.batch([row])) for row in rows])
    assert whole.accuracy == pytest.approx(
        float((logits.argmax(-1) == torch.tensor([row.label for row in rows])).float().mean())
    )


def test_logits_that_are_not_finite_are_not_counted_as_wrong(roberta: Path) -> None:
    session = sessions.prepare(build_config([f"model.path={roberta}", "data=demo", "objective.loss=accuracy"]))
    row = TokenizedExample([0, 7, 4, 2], [0] * 4, 2, 0)
    with torch.no_grad():
        for p in session.params.tensors.values():
            p.fill_(math.nan)
        assert math.isnan(session.loss(session.batch([row])))
        assert not evaluation.evaluate(session, [row]).is_finite


def test_the_metrics() -> None:
    rng = np.random.default_rng(0)
    labels, predicted = (rng.integers(0, 2, size=50).tolist() for _ in range(2))
    three, guessed = (rng.integers(0, 3, size=50).tolist() for _ in range(2))
    assert compute_score("accuracy", labels, predicted, 2) == np.mean(np.array(labels) == np.array(predicted))
    assert compute_score("f1", labels, predicted, 2) == pytest.approx(f1_score(labels, predicted))
    assert compute_score("f1", three, guessed, 3) == pytest.approx(f1_score(three, guessed, average="macro"))
    assert compute_score("matthews", labels, predicted, 2) == pytest.approx(matthews_corrcoef(labels, predicted))
    assert compute_score("f1", [1, 1, 0], [0, 0, 0], 2) == 0.0
    assert not math.isnan(compute_score("matthews", [1, 1, 0], [0, 0, 0], 2))


@pytest.mark.parametrize("predicted", [[0, 1, 1, 1], [0, 1, 1, 2], [2, 2, 2, 2], [0, 0, 1, 1]])
@pytest.mark.parametrize("count", [2, 3])
def test_f1_is_that_of_the_task_whatever_is_predicted(predicted: list[int], count: int) -> None:
    """By the number of the task's labels, and equal to the loss."""
    if max(predicted) < count:
        labels = [0, 0, 1, 1]
        logits = torch.eye(count)[predicted]
        score = compute_score("f1", labels, predicted, count)
        assert score == pytest.approx(1 - float(f1_loss(logits, torch.tensor(labels))))
        if count == 3 and predicted == [0, 1, 1, 1]:
            assert score == pytest.approx((2 / 3 + 0.8) / 3)


def test_the_best_step_has_the_highest_score_and_the_earliest_wins_a_tie() -> None:
    assert best_step({0: 0.5, 10: 0.75, 20: 0.75, 30: 0.25}) == 10
    assert best_step({20: 0.75, 10: 0.75}) == 10
    assert best_step({0: -0.1}) == 0
