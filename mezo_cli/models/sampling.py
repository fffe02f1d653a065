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
    """The noise of a batch of completions.

    Args:
        seed, step: of the run.
        keys: (row, sample) of each completion.
        device: of the noise.
    """

    def __init__(self, seed: int, step: int, keys: Sequence[tuple[int, int]], device: torch.device) -> None:
        words = [stream_key(seed, f"completion {row} {sample}") for row, sample in keys]
        self._step, self._all_keys = step, torch.tensor(words).to(device)
        self.select(torch.arange(len(keys), device=device))

    def select(self, rows: Tensor) -> None:
        """Keep these completions, in this order. Members of a population have the same keys: each is drawn once."""
        self._all_keys = self._all_keys[rows]
        self._keys, self._of_row = torch.unique(self._all_keys, dim=0, return_inverse=True)

    def draw(self, position: int, words: int) -> Tensor:
        """Return standard Gumbel numbers, float32 [completions, words], for the token at a position.

        Args:
            position: of the token, from 0.
            words: size of the vocabulary.
        """
        device = self._keys.device
        blocks = torch.arange(-(-words // 4), device=device)
        counter = [blocks, *(torch.full((), number, device=device) for number in (position, self._step, 0))]
        rows = max(1, BLOCKS // len(blocks)) if device.type == "cpu" else len(self._keys)
        return torch.cat([_gumbel(counter, keys) for keys in self._keys.split(rows)])[self._of_row, :words]


def _gumbel(counter: Sequence[Tensor], keys: Tensor) -> Tensor:
    """Return four Gumbel numbers per block of each key, float32 [keys, 4 blocks]."""
    drawn = philox(counter[0], counter[1], counter[2], counter[3], keys[:, :1], keys[:, 1:])
    low = torch.stack([word.to(torch.int32) for word in drawn], dim=-1) & ((1 << BITS) - 1)
    uniform = (low.flatten(1).float() + 0.5) * 2.0**-BITS
    return -torch.log(-torch.log1p(-uniform))
