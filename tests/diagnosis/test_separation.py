"""AUC, its error by chance, and the choice of other label words."""

import numpy as np
import pytest

from mezo_cli.diagnosis.separation import chance_error, choose_words, separation

RANDOM = np.random.RandomState(0)


def test_separation_is_the_difference_for_two_labels_and_the_mean_for_more() -> None:
    labels = np.repeat([0, 1, 2], 5)
    assert separation(np.eye(3)[labels], labels) == 1.0
    two = np.repeat([0, 1], 5)
    assert separation(np.eye(2)[two] + [7.0, 0.0], two) == 1.0  # biased: every row gets label 0


def test_the_error_by_chance_is_that_of_random_scores() -> None:
    labels = np.repeat([0, 1], 16)
    drawn = [separation(RANDOM.randn(32, 2), labels) for _ in range(400)]
    assert chance_error(labels) == pytest.approx(np.std(drawn), rel=0.15)


@pytest.mark.parametrize("labels", [np.repeat([0, 1], 40), np.repeat([0, 1, 2], 30)])
def test_a_planted_word_is_found(labels: np.ndarray) -> None:
    current, candidates = RANDOM.randn(len(labels), labels.max() + 1), RANDOM.randn(len(labels), 20)
    candidates[:, 7] += 4.0 * (labels == 1)
    chosen, reached = choose_words(current, candidates, labels)
    assert chosen[1] == 7
    assert reached > separation(current, labels) + 0.1
