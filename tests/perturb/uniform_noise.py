"""An example of a noise kind: z is uniform with variance 1, on 256 levels. A table row points to this module."""

import torch
from torch import Tensor

from mezo_cli.perturb.noise.counter import CounterNoise
from mezo_cli.perturb.noise.kernels import make_kernels, random_words

SCALE = (3 / (1 - 2**-16)) ** 0.5  # levels (2 i - 255) / 256 have the variance (1 - 2^-16) / 3


def draw(tiles: Tensor, keys: Tensor, step_sample: Tensor, levels: Tensor) -> Tensor:
    """Draw c z: for each 8 bits of a word the entry of `levels`, float32 [T, 4, 4, LANES]."""
    shifts = torch.arange(4, dtype=torch.int32, device=tiles.device).view(4, 1) * 8
    return levels[(random_words(tiles, keys, step_sample) >> shifts) & 0xFF]


def levels(c: float, device: torch.device) -> Tensor:
    """Return c times the levels, float32 [256]."""
    z = (2 * torch.arange(256) - 255) / 256 * SCALE
    return (z * torch.tensor(c, dtype=torch.float32)).to(device)


KERNELS = make_kernels(draw, per_word=4, max_tiles=2048)


def uniform_noise() -> CounterNoise:
    """Return the noise."""
    return CounterNoise("uniform", KERNELS, levels)
