"""Gaussian noise: each element of z is a quantile of N(0, 1), looked up in a table by 16 random bits."""

from functools import lru_cache, partial
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from mezo_cli.perturb.noise.counter import CounterNoise
from mezo_cli.perturb.noise.direction import to_float32
from mezo_cli.perturb.noise.kernels import keep, make_kernels, random_words

CODES = 1 << 16  # entries of the table


def draw(tiles: Tensor, keys: Tensor, step_sample: Tensor, table: Tensor) -> Tensor:
    """Draw c z: for each 16 bits of a word the entry of `table` (float32 [65536]), float32 [T, 4, 2, LANES]."""
    shifts = torch.arange(2, dtype=torch.int32, device=tiles.device).view(2, 1) * 16
    codes = (random_words(tiles, keys, step_sample) >> shifts) & 0xFFFF
    # not table[codes]: the compiled code of an embedding does not check for negative indices, and takes 0.6 of the time
    return torch.nn.functional.embedding(codes, table.view(-1, 1)).squeeze(-1)


@lru_cache(maxsize=1)
def gaussian_table() -> Tensor:
    """Return the quantiles of N(0, 1) at (i + 1/2) / 65536, scaled to a variance of 1: float32 [65536].

    Entry 65535 - i is entry i with its sign flipped, so the mean is 0. The largest is 4.325. They are computed by
    Python's `NormalDist` (Wichura's AS 241, in float64) and rounded to float32.
    """
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse(0.5 + (i + 0.5) / CODES) for i in range(CODES // 2)])
    upper /= np.sqrt(np.mean(upper**2))
    return torch.from_numpy(np.concatenate([-upper[::-1], upper]).astype(np.float32))


_table_on = keep(lambda device: gaussian_table().to(device), 8)


def scaled_table(c: float, device: torch.device) -> Tensor:
    """Return c times the table, float32 [65536]."""
    # Multiplied on the device: a copy of each scaled table would wait for it. A product is the same on every device.
    return _table_on(device) * to_float32(c)


KERNELS = make_kernels(draw, per_word=2, max_tiles=4096, native="gaussian")
# Makes the noise: z ~ N(0, I).
gaussian_noise = partial(CounterNoise, "gaussian", KERNELS, scaled_table)
