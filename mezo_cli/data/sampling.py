"""Draw row numbers from a seed: the rows of few-shot splits and of a held-out dev set, and those of each batch.

The published code draws its splits from numpy's legacy global generator; `RandomState(seed)` gives the same numbers and
leaves the global generator alone. Its streams are frozen; those of newer generators may change with numpy's version.

The batch of a step depends on the rows, the batch size, the seed and the step alone, so a resumed run gets the same
batches. A batch size above the number of rows means that number.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError, join

Row = TypeVar("Row")
TEST_ROWS = 1000  # the published code evaluates on at most this many test rows
TEST_SEED = 42  # and draws them with this seed, whatever the data seed


# --- splits ---


def few_shot(labels: Sequence[int], shots: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the row numbers of train (`shots` rows per class) and of dev (the next `shots`): LM-BFF's k-shot protocol.

    All rows are shuffled once. Then the classes follow each other, in the order of their first row after the shuffle.
    A class with too few rows gives what it has.
    """
    order = list(range(len(labels)))
    np.random.RandomState(seed).shuffle(order)
    groups: dict[int, list[int]] = {}
    for row in order:
        groups.setdefault(labels[row], []).append(row)
    train = [row for group in groups.values() for row in group[:shots]]
    dev = [row for group in groups.values() for row in group[shots : 2 * shots]]
    return train, dev


def published_test(count: int) -> list[int]:
    """Return the row numbers of the published code's test set out of `count` rows.

    They are all rows, or the first 1,000 after a shuffle with seed 42. For .tsv the published code shuffles the lines,
    for .csv it calls pandas' `sample(n=1000, random_state=42)`; both give the same rows.
    """
    if count <= TEST_ROWS:
        return list(range(count))
    return np.random.RandomState(TEST_SEED).permutation(count)[:TEST_ROWS].tolist()


def demonstrations(count: int, pool: int, own: Sequence[int | None], seed: int) -> list[list[int]]:
    """Return the numbers of `count` rows out of `pool` for each row to evaluate, as the published code draws them.

    The seed gives each row a seed of its own, by the row's place; the set is the head of a permutation by that.

    Args:
        count: rows in a set; less than `pool`.
        pool: rows to draw from.
        own: the number in the pool of each row to evaluate, which is not drawn for it; None for a row of another split.
        seed: of the data.
    """
    seeds = np.random.RandomState(seed).randint(0, 10_000, len(own))
    heads = (np.random.RandomState(row_seed).permutation(pool)[: count + 1].tolist() for row_seed in seeds)
    return [[row for row in head if row != number][:count] for head, number in zip(heads, own, strict=True)]


def hold_out(labels: Sequence[int], size: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the row numbers that stay, and of a stratified set of `size` others.

    Each class gives its quota, largest remainders first, and keeps at least one row if possible. Both parts are in
    file order. There must be more than `size` rows.
    """
    members: dict[int, list[int]] = {}
    for row, label in enumerate(labels):
        members.setdefault(label, []).append(row)
    can_keep = sum(len(rows) - 1 for rows in members.values()) >= size
    most = {label: len(rows) - can_keep for label, rows in members.items()}
    quota = {label: len(rows) * size / len(labels) for label, rows in members.items()}
    take = {label: min(int(quota[label]), most[label]) for label in members}
    while sum(take.values()) < size:
        open_labels = [label for label in sorted(members) if take[label] < most[label]]
        take[max(open_labels, key=lambda label: quota[label] - take[label])] += 1
    generator = np.random.RandomState(seed)
    held_out: set[int] = set()
    for label in sorted(members):
        held_out.update(members[label][i] for i in generator.permutation(len(members[label]))[: take[label]])
    return [row for row in range(len(labels)) if row not in held_out], sorted(held_out)


def sample(count: int, train: int, dev: int, seed: int) -> tuple[list[int], list[int]]:
    """Return `train` row numbers and `dev` others out of `count`, whatever their class (the paper's OPT runs).

    One permutation gives both: first the train rows, then the dev rows. `count` must be at least train + dev.
    """
    order = np.random.RandomState(seed).permutation(count)[: train + dev].tolist()
    return order[:train], order[train:]


def limit(rows: list[Row], cap: int | None) -> list[Row]:
    """Return a uniform sample of `cap` rows, in their order; all rows if there are no more than that.

    The seed is fixed, so that runs with different seeds are evaluated on the same rows. The sample of a smaller cap is
    a subset of that of a larger cap.
    """
    if cap is None or len(rows) <= cap:
        return rows
    kept = np.random.RandomState(TEST_SEED).permutation(len(rows))[:cap]
    return [rows[i] for i in sorted(kept.tolist())]


# --- batches, and the weights of their losses ---


class BatchSampler:
    """`shuffled`: every epoch is a new uniform shuffle, and a batch may run into the next epoch.

    Attributes:
        takes_all_rows: whether each batch is all rows, in some order.

    Args:
        rows: number of training rows.
        batch_size: rows per batch.
        seed: the run's seed.
        stream: sets the shuffles apart from others of this seed.
    """

    def __init__(self, rows: int, batch_size: int, seed: int, stream: tuple[int, ...] = ()) -> None:
        self.rows, self.batch_size, self._seed, self._stream = rows, min(batch_size, rows), seed, stream
        self.takes_all_rows = self.batch_size == rows
        self._epochs: dict[int, np.ndarray] = {}  # the current epoch's shuffle and the one before it

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (from 0)."""
        return [self.row(position) for position in range(step * self.batch_size, (step + 1) * self.batch_size)]

    def weights(self, batch: Sequence[int]) -> list[float] | None:
        """Return what the loss of each row of a batch is multiplied by; None for 1 throughout."""
        return None

    def row(self, position: int) -> int:
        """Return the row at a position of all epochs, one after the other."""
        number, place = divmod(position, self.rows)
        if number not in self._epochs:
            self._epochs = {k: v for k, v in self._epochs.items() if k == number - 1}
            self._epochs[number] = np.random.RandomState([self._seed, number, *self._stream]).permutation(self.rows)
        return int(self._epochs[number][place])


class ReplacementSampler(BatchSampler):
    """`replacement`: every row of every batch is drawn by itself, uniformly: a control for the shuffles."""

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        super().__init__(rows, batch_size, seed)
        self.takes_all_rows = False

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (from 0)."""
        drawn = np.random.RandomState([self._seed, step, 0]).randint(self.rows, size=self.batch_size)
        return [int(row) for row in drawn]


class BalancedSampler(BatchSampler):
    """`balanced`: as many rows of each label; where that leaves a remainder, it rotates over the labels.

    The p-th of all rows that are drawn has the label p mod C, and is the next of that label's own shuffles. A row of a
    label with n_c of n rows, of which a batch of B rows has k_c, has the weight n_c B / (n k_c): the mean of the
    weighted losses estimates the mean over all rows, whatever the labels' shares are.

    Args:
        labels: the number of the label of each training row; each label has one at least.
        batch_size: rows per batch.
        seed: the run's seed.
        weighted: whether `weights` returns these weights; without them the loss is that of equally frequent labels.
    """

    def __init__(self, labels: Sequence[int], batch_size: int, seed: int, weighted: bool = True) -> None:
        super().__init__(len(labels), batch_size, seed)
        self._labels, self._weighted, self.takes_all_rows = labels, weighted, False
        self._rows: list[list[int]] = [[] for _ in range(max(labels) + 1)]
        for row, label in enumerate(labels):
            self._rows[label].append(row)
        self._streams = [BatchSampler(len(rows), 1, seed, (1 + label,)) for label, rows in enumerate(self._rows)]

    def row(self, position: int) -> int:
        """Return the row at a position of all that are drawn."""
        turn, label = divmod(position, len(self._streams))
        return self._rows[label][self._streams[label].row(turn)]

    def weights(self, batch: Sequence[int]) -> list[float] | None:
        """Return the weight of each row of a batch; None where all are 1."""
        drawn = Counter(self._labels[row] for row in batch)
        total = len(self._labels)
        weights = {label: len(self._rows[label]) * len(batch) / (total * count) for label, count in drawn.items()}
        if not self._weighted or set(weights.values()) == {1.0}:
            return None
        return [weights[self._labels[row]] for row in batch]


def make_sampler(config: Config, rows: Sequence[Any]) -> BatchSampler:
    """Return the sampler that `data.batches` names, over tokenized training rows."""
    names, size, seed = config.task.labels, config.batch_size, config.seed
    if config.data.batches != "balanced":
        sampler = BatchSampler if config.data.batches == "shuffled" else ReplacementSampler
        return sampler(len(rows), size, seed)
    labels = [row.label for row in rows]
    absent = [name for number, name in enumerate(names) if number not in set(labels)]
    if absent:
        what = f"label{'s' if len(absent) > 1 else ''} {join(absent)}"
        raise UserError(f"data.batches=balanced: train has no row of the {what}; use data.batches=shuffled")
    return BalancedSampler(labels, size, seed, config.data.weights == "mean")
