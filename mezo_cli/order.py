"""Which rows make up each batch."""

from collections.abc import Sequence

import numpy as np

from mezo_cli.schema import Config, Encoded


class Order:
    """Passes over a fresh shuffle each, drawn uniformly, never by length.

    The batch of a step is a function of (rows, batch size, seed, step) alone, so a resumed run sees the same ones.
    A batch larger than the data is all of the data.
    """

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self.rows, self.size, self.seed = rows, min(batch_size, rows), seed
        self._passes: dict[int, np.ndarray] = {}

    @classmethod
    def of(cls, config: Config, rows: Sequence[Encoded]) -> "Order":
        """The order in which a run takes its training rows."""
        return cls(len(rows), config.batch_size, config.seed)

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of step `step` (from 0)."""
        places = range(step * self.size, (step + 1) * self.size)
        return [int(self._pass(place // self.rows)[place % self.rows]) for place in places]

    def _pass(self, number: int) -> np.ndarray:
        if number not in self._passes:
            self._passes = {k: v for k, v in self._passes.items() if k == number - 1}
            # RandomState's streams are frozen for good, those of numpy's newer generators are not.
            self._passes[number] = np.random.RandomState([self.seed, number]).permutation(self.rows)
        return self._passes[number]
