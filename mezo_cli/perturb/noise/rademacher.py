"""Rademacher noise: each element of z is +1 or -1, by one random bit."""

from functools import partial

import torch
from torch import Tensor

from mezo_cli.perturb.noise.counter import CounterNoise
from mezo_cli.perturb.noise.direction import to_float32
from mezo_cli.perturb.noise.kernels import make_kernels, random_words


def draw(tiles: Tensor, keys: Tensor, step_sample: Tensor, c: Tensor) -> Tensor:
    """Draw c z: +c for a set bit, else -c (c: float32 []), float32 [T, 4, 32, LANES]."""
    shifts = torch.arange(32, dtype=torch.int32, device=tiles.device).view(32, 1)
    return torch.where((random_words(tiles, keys, step_sample) >> shifts) & 1 != 0, c, -c)


def coefficient(c: float, device: torch.device) -> Tensor:
    """Return c, float32 []."""
    return torch.full((), to_float32(c), dtype=torch.float32, device=device)


KERNELS = make_kernels(draw, per_word=32, max_tiles=1024, native="rademacher")
# Makes the noise: z is +1 or -1, each with probability 1/2.
rademacher_noise = partial(CounterNoise, "rademacher", KERNELS, coefficient)
