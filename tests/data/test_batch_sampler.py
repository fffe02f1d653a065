"""The batches of a run: every row once per epoch, and the same batch for the same step."""

from mezo_cli.data.batch_sampler import BatchSampler


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


def test_a_batch_size_above_the_number_of_rows_takes_all_rows() -> None:
    assert sorted(BatchSampler(5, 64, 42).batch(3)) == list(range(5))
