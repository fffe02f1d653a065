"""The metrics: scikit-learn's values, and the same number from resampled rows as from the rows themselves."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from mezo_cli.objectives import METRICS
from mezo_cli.objectives.scoring import f1_loss


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rows", [6, 500])  # 6: some labels are missing
def test_the_metrics_are_those_of_scikit_learn(count: int, rows: int) -> None:
    generator = np.random.default_rng(rows)
    for _ in range(10):
        labels, predicted = generator.integers(count, size=(2, rows))
        f1 = {"average": "binary"} if count == 2 else {"average": "macro", "labels": range(count)}
        expected = {
            "accuracy": accuracy_score(labels, predicted),
            "f1": f1_score(labels, predicted, zero_division=0.0, **f1),
            "matthews": matthews_corrcoef(labels, predicted),
        }
        assert {name: METRICS.load(name)(np.eye(count)[predicted], labels) for name in METRICS.names} == expected
        loss = f1_loss(torch.eye(count)[predicted], torch.from_numpy(labels))
        assert 1 - float(loss) == pytest.approx(expected["f1"])


@pytest.mark.parametrize("name", METRICS.names)
def test_samples_of_the_rows_have_the_metric_of_their_rows(name: str) -> None:
    generator = np.random.default_rng(0)
    scores, labels = generator.normal(size=(8, 3)), generator.integers(3, size=8)
    samples = generator.integers(8, size=(20, 8))
    metric = METRICS.load(name)
    assert np.array_equal(
        metric.samples(scores, labels)(samples), [metric(scores[rows], labels[rows]) for rows in samples]
    )
