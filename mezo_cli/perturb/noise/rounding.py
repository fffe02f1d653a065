"""Stochastic rounding: float32 values to two bytes, up or down at random, so that the mean is the value itself.

An update of MeZO is far smaller than the distance of neighbouring values in two bytes (2^-8 of a weight in bfloat16).
Rounding to nearest would drop nearly all of them. With a probability equal to the distance from the lower neighbour,
in units of their distance, the result is right in expectation (Gupta et al. 2015, arXiv 1502.02551).

The random bits are a function of (seed, "round", step, tensor name, element index), by the generator of z. So a
replayed step rounds as in training. The result is again float32: a value that the dtype represents, stored exactly.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.perturb.noise.counter import key_tensors
from mezo_cli.perturb.noise.direction import Direction
from mezo_cli.perturb.noise.kernels import LANES, random_words
from mezo_cli.perturb.noise.spans import compute_device

TILE = 4 * 2 * LANES  # elements: one random word serves two
MAX_TILES = 4096  # per call on a CPU
_DOWN_TO_EVEN = {"bfloat16": -(1 << 16), "float16": -(1 << 13)}  # masks of the bits of a float32 that are kept


def round_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Return the values, float32, rounded to those of bfloat16: away from 0 if `bits` / 2^16 is large enough.

    A value that bfloat16 represents stays, and so do inf and nan. Beyond the largest finite one lies inf.

    Args:
        values: float32, any shape.
        bits: int32 of that shape, uniform in [0, 2^16).
    """
    # bfloat16 is the upper half of a float32, also for subnormal numbers. A carry from the lower half goes up by one.
    rounded = ((values.view(torch.int32) + bits) & _DOWN_TO_EVEN["bfloat16"]).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def round_float16(values: Tensor, bits: Tensor) -> Tensor:
    """Return the values, float32, rounded to those of float16: see `round_bfloat16`. Beyond 65,504 lies inf."""
    size = values.abs()
    # float16 keeps 10 of the 23 bits of the mantissa, which leaves 13 to be rounded.
    normal = ((values.view(torch.int32) + (bits >> 3)) & _DOWN_TO_EVEN["float16"]).view(torch.float32)
    normal = torch.where(normal.abs() < 65536.0, normal, normal * torch.inf)
    # Below 2^-14 its values are the multiples of 2^-24. All of these products and differences are exact.
    steps = size * 2.0**24
    whole = steps.floor()
    small = torch.copysign((whole + ((steps - whole) * 65536.0 > bits)) * 2.0**-24, values)
    return torch.where(values.isfinite(), torch.where(size < 2.0**-14, small, normal), values)


def _make_kernel(function: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    def round_tiles(values: Tensor, tiles: Tensor, keys: Tensor, step_sample: Tensor) -> None:
        shifts = torch.arange(2, dtype=torch.int32, device=tiles.device).view(2, 1) * 16
        bits = (random_words(tiles, keys, step_sample) >> shifts) & 0xFFFF  # [T, 4, 2, LANES]
        view = values.view(bits.shape)
        view.copy_(function(view, bits))

    return Kernel(round_tiles, 1, TILE, MAX_TILES)


KERNELS = {torch.bfloat16: _make_kernel(round_bfloat16), torch.float16: _make_kernel(round_float16)}


@torch.no_grad()
def round_(values: Tensor, dtype: torch.dtype, name: str, direction: Direction, start: int = 0) -> None:
    """Round a tensor, or a block of it, to the values of `dtype` in place.

    Args:
        values: float32, contiguous, any shape.
        dtype: bfloat16 or float16.
        name: the tensor's name in the model.
        direction: of the step (seed, step, 0): its bits are drawn.
        start: index in the tensor of the first element: a multiple of `TILE`.
    """
    if start % TILE:
        raise ValueError(f"a block starts at a multiple of {TILE} elements, not at {start}")
    flat, device = values.view(-1), compute_device(values.device)
    count = max(2, -(-flat.numel() // TILE))  # what is compiled for any number of tiles is not compiled for one
    in_place = flat.numel() == count * TILE and device == flat.device
    whole = flat if in_place else torch.zeros(count * TILE, device=device)
    if not in_place:
        whole[: flat.numel()] = flat
    tiles = torch.arange(start // TILE, start // TILE + count, dtype=torch.int32, device=device)
    # no name of a tensor has a \0
    KERNELS[dtype](whole, tiles, *key_tensors(direction, f"round\0{name}", count, device))
    if not in_place:
        flat.copy_(whole[: flat.numel()])
