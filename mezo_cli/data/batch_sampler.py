"""Choose the training rows of each batch."""

import numpy as np


class BatchSampler:
    """Batches of row numbers: every epoch is a new uniform shuffle, and a batch may run into the next epoch.

    The batch of a step depends on (rows, batch size, seed, step) alone, so a resumed run gets the same batches.
    A batch size above the number of rows means all rows.

    Args:
        rows: number of training rows.
        batch_size: rows per batch.
        seed: the run's seed.
    """

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self.rows, self.batch_size, self.seed = rows, min(batch_size, rows), seed
        self._epochs: dict[int, np.ndarray] = {}  # the current epoch's shuffle and the one before it

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (from 0)."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [int(self._epoch(position // self.rows)[position % self.rows]) for position in positions]

    def _epoch(self, number: int) -> np.ndarray:
        if number not in self._epochs:
            self._epochs = {k: v for k, v in self._epochs.items() if k == number - 1}
            # The streams of RandomState are frozen; those of numpy's newer generators may change with its version.
            self._epochs[number] = np.random.RandomState([self.seed, number]).permutation(self.rows)
        return self._epochs[number]
