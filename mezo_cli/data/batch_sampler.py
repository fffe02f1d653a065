"""Choose the training rows of each batch, and the weights of their losses.

The batch of a step depends on the rows, the batch size, the seed and the step alone, so a resumed run gets the same
batches. A batch size above the number of rows means that number.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError, join


class Sampler(Protocol):
    """Chooses the rows of each batch.

    Attributes:
        takes_all_rows: whether each batch is all rows, in some order.
    """

    takes_all_rows: bool

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (from 0)."""

    def weights(self, batch: Sequence[int]) -> list[float] | None:
        """Return what the loss of each row of a batch is multiplied by; None for 1 throughout."""


class BatchSampler:
    """`shuffled`: every epoch is a new uniform shuffle, and a batch may run into the next epoch.

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

    def weights(self, batch: Sequence[int]) -> None:
        """Return None."""

    def row(self, position: int) -> int:
        """Return the row at a position of all epochs, one after the other."""
        return int(self._epoch(position // self.rows)[position % self.rows])

    def _epoch(self, number: int) -> np.ndarray:
        if number not in self._epochs:
            self._epochs = {k: v for k, v in self._epochs.items() if k == number - 1}
            # The streams of RandomState are frozen; those of numpy's newer generators may change with its version.
            shuffle = np.random.RandomState([self._seed, number, *self._stream]).permutation(self.rows)
            self._epochs[number] = shuffle
        return self._epochs[number]


class ReplacementSampler:
    """`replacement`: every row of every batch is drawn by itself, uniformly: a control for the shuffles.

    Args:
        rows, batch_size, seed: as those of `BatchSampler`.
    """

    takes_all_rows = False

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self.rows, self.batch_size, self._seed = rows, min(batch_size, rows), seed

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (from 0)."""
        drawn = np.random.RandomState([self._seed, step, 0]).randint(self.rows, size=self.batch_size)
        return [int(row) for row in drawn]

    def weights(self, batch: Sequence[int]) -> None:
        """Return None."""


class BalancedSampler:
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

    takes_all_rows = False

    def __init__(self, labels: Sequence[int], batch_size: int, seed: int, weighted: bool = True) -> None:
        self._labels, self._weighted, self.batch_size = labels, weighted, min(batch_size, len(labels))
        self._rows: list[list[int]] = [[] for _ in range(max(labels) + 1)]
        for row, label in enumerate(labels):
            self._rows[label].append(row)
        self._streams = [BatchSampler(len(rows), 1, seed, (1 + label,)) for label, rows in enumerate(self._rows)]

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (from 0)."""
        return [self._row(position) for position in range(step * self.batch_size, (step + 1) * self.batch_size)]

    def _row(self, position: int) -> int:
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


def _balanced(config: Config, rows: Sequence[Any]) -> Sampler:
    names, labels = config.task.labels, [row.label for row in rows]
    absent = [name for number, name in enumerate(names) if number not in set(labels)]
    if absent:
        what = f"label{'s' if len(absent) > 1 else ''} {join(absent)}"
        raise UserError(f"data.batches=balanced: train has no row of the {what}; use data.batches=shuffled")
    return BalancedSampler(labels, config.batch_size, config.seed, config.data.weights == "mean")


SAMPLERS: Mapping[str, Callable[[Config, Sequence[Any]], Sampler]] = {
    "shuffled": lambda config, rows: BatchSampler(len(rows), config.batch_size, config.seed),
    "balanced": _balanced,
    "replacement": lambda config, rows: ReplacementSampler(len(rows), config.batch_size, config.seed),
}


def make_sampler(config: Config, rows: Sequence[Any]) -> Sampler:
    """Return the sampler that `data.batches` names, over tokenized training rows.

    Raises:
        UserError: for balanced batches when a label has no row.
    """
    return SAMPLERS[config.data.batches](config, rows)
