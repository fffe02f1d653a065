"""Gumbel noise for drawing tokens: argmax(logits / temperature + noise) is a draw from softmax(logits / temperature).

A number is a pure function of (seed, step, row, sample, position of the token, word of the vocabulary), by Philox: it
depends neither on the order of rows nor on how they share batches, and is the same for all members of a step.
Maddison, Tarlow, Minka: "A* Sampling" (NeurIPS 2014), section 2, have the Gumbel-max trick.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mezo_cli.perturb.noise.philox import philox, stream_key

BITS = 31  # of a random number
BLOCKS = 1 << 14  # Philox blocks per call on a CPU, so that their words stay in cache


class GumbelNoise:
    """The noise of a batch of completions, given the (row, sample) of each as its key."""

    def __init__(self, seed: int, step: int, keys: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._step, self._device = step, device
        self._of_rows = [tuple(stream_key(seed, f"completion {row} {sample}")) for row, sample in keys]
        self.select(range(len(keys)))

    def select(self, rows: Sequence[int]) -> None:
        """Keep these completions, in this order. Members of a population have the same keys: each is drawn once."""
        self._of_rows = [self._of_rows[row] for row in rows]
        place = {key: number for number, key in enumerate(dict.fromkeys(self._of_rows))}
        self._keys = torch.tensor(list(place)).to(self._device)
        shared = len(place) < len(rows)
        self._places = torch.tensor([place[key] for key in self._of_rows]).to(self._device) if shared else None

    def draw(self, position: int, words: int) -> Tensor:
        """Return standard Gumbel numbers, float32 [completions, words], for the token at a position (from 0)."""
        device = self._keys.device
        blocks = torch.arange(-(-words // 4), device=device)
        counter = [blocks, *(torch.full((), number, device=device) for number in (position, self._step, 0))]
        rows = max(1, BLOCKS // len(blocks)) if device.type == "cpu" else len(self._keys)
        drawn = torch.cat([_gumbel(counter, keys) for keys in self._keys.split(rows)])[:, :words]
        return drawn if self._places is None else drawn[self._places]


def _gumbel(counter: Sequence[Tensor], keys: Tensor) -> Tensor:
    """Return four Gumbel numbers per block of each key, float32 [keys, 4 blocks]."""
    drawn = philox(counter[0], counter[1], counter[2], counter[3], keys[:, :1], keys[:, 1:])
    low = torch.stack([word.to(torch.int32) for word in drawn], dim=-1) & ((1 << BITS) - 1)
    uniform = (low.flatten(1).float() + 0.5) * 2.0**-BITS
    return -torch.log(-torch.log1p(-uniform))
