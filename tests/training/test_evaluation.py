"""Evaluation: independent of its batches, nan for logits that are not finite, scikit-learn's metrics, the best step."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import TokenizedExample
from mezo_cli.session.opening import opened

pytestmark = pytest.mark.usefixtures("eager_kernels")


def test_an_evaluation_does_not_depend_on_its_batches(roberta: Path) -> None:
    made = build_config([f"model.path={roberta}", "data=demo", "objective=mlm"])
    session = opened(made)
    rng = np.random.default_rng(0)
    rows = [
        TokenizedExample([0, *rng.integers(5, 80, size=n).tolist(), 4, 2], [0] * (n + 3), n + 1, n % 2)
        for n in range(3, 24)
    ]
    whole = session.objective.evaluate(rows)
    for size in (1, 4, 100):
        session.objective.config = build_config([f"model.path={roberta}", "data=demo", f"eval_batch_size={size}"])
        seen = session.objective.evaluate(rows)
        assert seen.details == whole.details
        assert seen.loss == pytest.approx(whole.loss, rel=1e-5)
    logits = torch.cat([session.objective.logits(session.objective.collate([row])) for row in rows])
    assert whole.metrics["accuracy"] == pytest.approx(
        float((logits.argmax(-1) == torch.tensor([row.label for row in rows])).float().mean())
    )


def test_the_best_step_has_the_best_score_then_the_lower_loss_then_is_the_earlier() -> None:
    config = build_config(["data=demo"])
    for scores, best in (
        ({0: (0.5, 1.0), 10: (0.75, 0.5), 20: (0.75, 0.5), 30: (0.25, 0.1)}, 10),
        ({0: (0.5, 1.0), 10: (0.5, 0.9)}, 10),
        ({20: (0.75, 1.0), 10: (0.75, 1.0)}, 10),
    ):
        evaluations = {step: {"accuracy": score, "loss": loss} for step, (score, loss) in scores.items()}
        assert config.best_step(evaluations) == best
