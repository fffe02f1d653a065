"""The batches of a run: every row once per epoch, and the same batch for the same step."""

import numpy as np
import pytest

from mezo_cli.data.sampling import BalancedSampler, BatchSampler, ReplacementSampler


def test_every_epoch_takes_every_row_once_and_epochs_differ() -> None:
    sampler = BatchSampler(10, 4, 42)
    rows = [i for step in range(10) for i in sampler.batch(step)]
    epochs = [rows[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_depends_on_its_step_and_the_seed_alone() -> None:
    fresh = [BatchSampler(10, 4, 42).batch(step) for step in range(9)]
    sampler = BatchSampler(10, 4, 42)
    assert [sampler.batch(step) for step in range(9)] == fresh
    assert [sampler.batch(step) for step in reversed(range(9))] == fresh[::-1]
    assert [BatchSampler(10, 4, 43).batch(step) for step in range(9)] != fresh
    assert sorted(BatchSampler(5, 64, 42).batch(3)) == list(range(5))  # no more rows than there are


LABELS = [0] * 12 + [1] * 6 + [2] * 6


def drawn(sampler: BalancedSampler, step: int) -> list[int]:
    return [LABELS[row] for row in sampler.batch(step)]


def test_a_balanced_batch_has_as_many_rows_of_each_label_and_the_remainder_rotates() -> None:
    sampler = BalancedSampler(LABELS, 7, 42)
    counts = [[drawn(sampler, step).count(label) for label in range(3)] for step in range(3)]
    assert all(sorted(count) == [2, 2, 3] for count in counts)
    assert np.sum(counts, axis=0).tolist() == [7, 7, 7]


def test_balanced_batches_take_every_row_of_a_label_once_per_epoch_and_need_no_state() -> None:
    sampler = BalancedSampler(LABELS, 6, 42)
    rows = [row for step in range(12) for row in sampler.batch(step)]
    for label in range(3):
        own = [row for row in rows if LABELS[row] == label]
        size = LABELS.count(label)
        epochs = [own[start : start + size] for start in range(0, 24, size)]
        assert all(sorted(epoch) == sorted(set(own)) for epoch in epochs)
        assert epochs[0] != epochs[1]
    assert [BalancedSampler(LABELS, 6, 42).batch(step) for step in (5, 0)] == [sampler.batch(5), sampler.batch(0)]


@pytest.mark.parametrize("size", [6, 7])
def test_weighted_losses_estimate_the_mean_over_all_rows(size: int) -> None:
    sampler, losses = BalancedSampler(LABELS, size, 1), np.array([3.0, 5.0, 9.0])[LABELS]
    for step in range(5):
        batch = sampler.batch(step)
        weights = sampler.weights(batch)
        assert weights is not None
        assert np.mean(losses[batch] * weights) == pytest.approx(losses.mean())
    assert BalancedSampler(LABELS, size, 1, weighted=False).weights(batch) is None
    assert BalancedSampler([0, 1, 2] * 5, 6, 3).weights([0, 1, 2, 3, 4, 5]) is None


def test_rows_drawn_by_themselves_repeat() -> None:
    sampler = ReplacementSampler(10, 8, 42)
    batches = [sampler.batch(step) for step in range(9)]
    assert batches == [ReplacementSampler(10, 8, 42).batch(step) for step in range(9)]
    assert any(len(set(batch)) < 8 for batch in batches)
    assert {row for batch in batches for row in batch} == set(range(10))
