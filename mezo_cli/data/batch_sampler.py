"""Choose the training rows of each batch, and the weights of their losses.

The batch of a step depends on the rows, the batch size, the seed and the step alone, so a resumed run gets the same
batches. A batch size above the number of rows means that number.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError, join


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
            # The streams of RandomState are frozen; those of numpy's newer generators may change with its version.
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
