"""A bias that was put into scores is found again, and nothing is found where there is none."""

import numpy as np
import pytest

from mezo_cli.objectives.scoring import best_threshold, fit_bias, remove_bias


def right(scores: np.ndarray, labels: np.ndarray) -> float:
    return float((scores.argmax(axis=1) == labels).mean())


def biased(rows: int, bias: list[float], shares: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return scores whose likelihood is the softmax of the scores less `bias`, and labels."""
    generator, count = np.random.default_rng(3), len(bias)
    labels = generator.choice(count, size=rows, p=shares)
    scores = generator.normal(size=(rows, count)) + 2.0 * np.eye(count)[labels]
    return scores + np.array(bias), labels


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.8, 0.2]])
def test_the_bias_between_two_labels_is_removed(shares: list[float]) -> None:
    scores, labels = biased(4000, [0.0, 5.0], shares)
    unbiased = scores - [0.0, 5.0]
    assert right(scores, labels) < right(unbiased, labels) - 0.2
    found = remove_bias(scores, labels)
    assert list(found) == ["label_shares", "best_threshold"]
    for bias in found.values():
        assert right(scores + bias, labels) > right(unbiased, labels) - 0.02
    predicted = (scores + found["label_shares"]).argmax(axis=1)
    assert np.mean(predicted == 1) == pytest.approx(np.mean(labels == 1), abs=1e-3)
    assert right(scores + found["best_threshold"], labels) >= right(scores + found["label_shares"], labels)


@pytest.mark.parametrize(
    ("margins", "labels", "wanted"),
    [
        ([0.1, 0.4, 0.5, 0.9], [0, 1, 0, 1], 0.25),  # as good as 0.7: the lowest
        ([0.5, 0.5, 0.5], [0, 1, 1], -0.5),  # equal margins cannot be parted
        ([1.0, 2.0], [0, 0], 3.0),
        ([2.0, 1.0], [1, 1], 0.0),
    ],
)
def test_the_best_threshold(margins: list[float], labels: list[int], wanted: float) -> None:
    found = best_threshold(np.array(margins), np.array(labels))
    assert found == pytest.approx(wanted)
    tried = [np.mean((np.array(margins) > at) == np.array(labels)) for at in np.linspace(-2, 4, 200)]
    assert np.mean((np.array(margins) > found) == np.array(labels)) == max(tried)


def test_the_bias_of_three_labels_is_fitted() -> None:
    scores, labels = biased(4000, [0.0, 4.0, -2.0], [0.3, 0.3, 0.4])
    unbiased = scores - [0.0, 4.0, -2.0]
    (bias,) = remove_bias(scores, labels).values()
    assert right(scores, labels) < 0.6
    assert right(scores + bias, labels) > right(unbiased, labels) - 0.01
    assert abs(bias.sum()) < 1e-3  # the L2 term takes the mean away
    mean = np.exp(scores + bias - (scores + bias).max(axis=1, keepdims=True))
    mean = (mean / mean.sum(axis=1, keepdims=True)).mean(axis=0)  # maximum likelihood: mean probabilities are shares
    assert mean == pytest.approx(np.bincount(labels) / 4000, abs=2 * 1e-3 * np.abs(bias).max() + 1e-4)


def test_a_label_without_rows_is_bounded() -> None:
    bias = fit_bias(np.zeros((20, 3)), np.arange(20) % 2)
    assert -20 < bias[2] < bias[0] == pytest.approx(bias[1])
