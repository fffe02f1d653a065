"""Stochastic rounding: float32 values to half precision, up or down at random, so that the mean is the value itself.

An update of MeZO is far smaller than the distance of neighbouring values in half precision (2^-8 of a weight in
bfloat16). Rounding to nearest would drop nearly all of them. With a probability equal to the distance from the lower
neighbour, in units of their distance, the result is right in expectation (Gupta et al. 2015, arXiv 1502.02551).

The random bits are a function of (seed, "round", step, tensor name, element index), by the generator of z. So a
replayed step rounds as in training. The result is again float32: a value that the dtype represents, stored exactly.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.compiled import Function, Kernel, compile_native
from mezo_cli.perturb.noise.kernels import (
    LANES,
    KernelSet,
    call_size,
    keep,
    random_words,
    step_sample,
    subtract_fraction,
)
from mezo_cli.perturb.noise.spans import Span

ROUND = (1 << 32) - 1  # in the place of a sample's number, which is never as large
PER_BLOCK = 4 * 2 * LANES  # elements per block of words: one word serves two
MAX_ELEMENTS = 1 << 20  # per call on a CPU
of_step = keep(step_sample, 64)  # what the kernels read per step
KEPT_BITS = {"bfloat16": -(1 << 16), "float16": -(1 << 13)}  # masks of a float32


def round_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Return the values, float32, rounded to those of bfloat16: away from 0 if `bits` / 2^16 is large enough.

    A value that bfloat16 represents stays, and so do inf and nan. Beyond the largest finite one lies inf.

    Args:
        values: float32, any shape.
        bits: int32 of that shape, uniform in [0, 2^16).
    """
    # bfloat16 is the upper half of a float32, also for subnormal numbers. A carry from the lower half goes up by one.
    # The lower half of inf is 0. That of nan may not be, and a carry could make it -0.
    rounded = ((values.view(torch.int32) + bits) & KEPT_BITS["bfloat16"]).view(torch.float32)
    return torch.where(values == values, rounded, values)


def round_float16(values: Tensor, bits: Tensor) -> Tensor:
    """Return the values, float32, rounded to those of float16: see `round_bfloat16`. Beyond 65,504 lies inf."""
    size = values.abs()
    # float16 keeps 10 of the 23 bits of the mantissa, which leaves 13 to be rounded.
    normal = ((values.view(torch.int32) + (bits >> 3)) & KEPT_BITS["float16"]).view(torch.float32)
    normal = torch.where(normal.abs() < 65536.0, normal, normal * torch.inf)
    # Below 2^-14 its values are the multiples of 2^-24. All of these products and differences are exact.
    steps = size * 2.0**24
    whole = steps.floor()
    small = torch.copysign((whole + ((steps - whole) * 65536.0 > bits)) * 2.0**-24, values)
    return torch.where(values == values, torch.where(size < 2.0**-14, small, normal), values)


FUNCTIONS: dict[torch.dtype, Callable[[Tensor, Tensor], Tensor]] = {
    torch.bfloat16: round_bfloat16,
    torch.float16: round_float16,
}


@cache
def kernel(dtype: torch.dtype, tile: int) -> Kernel:
    """Return the kernel that rounds storage in tiles of that many elements; the bits do not depend on the tile."""
    function = FUNCTIONS[dtype]

    def round_tiles(values: Tensor, tiles: Tensor, keys: Tensor, step_sample: Tensor) -> None:
        bits = _bits(tiles, keys, step_sample, tile)
        view = values.view(bits.shape)
        view.copy_(function(view, bits))

    native = partial(compile_native, "none", f"round_{str(dtype).removeprefix('torch.')}", tile)
    return Kernel(round_tiles, 1, tile, MAX_ELEMENTS // tile, native)


@cache
def update_kernel(kernels: KernelSet, operation: str) -> Kernel:
    """Return the kernel of a step of one term: theta <- round(theta + c z), theta in half precision.

    Args:
        kernels: of the kind of noise.
        operation: `add`, or, with one more input, `shrink`: what theta becomes before c z is added.
    """

    def add(theta: Tensor, tiles: Tensor, keys: Tensor, step_sample: Tensor, scaled: Tensor, rounding: Tensor) -> None:
        cz, bits = _in_one_shape(kernels.draw(tiles, keys, step_sample, scaled), tiles, keys, rounding)
        view = theta.view(cz.shape)
        view.copy_(FUNCTIONS[theta.dtype](view.float() + cz, bits))

    def shrink(theta: Tensor, tiles: Tensor, keys: Tensor, *inputs: Tensor) -> None:
        step_sample, scaled, rounding, fraction = inputs
        cz, bits = _in_one_shape(kernels.draw(tiles, keys, step_sample, scaled), tiles, keys, rounding)
        view = theta.view(cz.shape)
        view.copy_(FUNCTIONS[theta.dtype]((subtract_fraction(view, fraction) + cz.double()).float(), bits))

    functions: dict[str, Function] = {"add": add, "shrink": shrink}
    native = partial(compile_native, kernels.native, operation, kernels.tile)
    return Kernel(functions[operation], 1, kernels.tile, MAX_ELEMENTS // kernels.tile, native)


def _in_one_shape(cz: Tensor, tiles: Tensor, keys: Tensor, step_sample: Tensor) -> tuple[Tensor, Tensor]:
    """Return c z, [T, 4, per_word, LANES], and the random bits of its elements in a shape that both are views of.

    A word of z serves `per_word` rows of LANES elements. A block of rounding words serves 8, and each of its words 2.
    All of these are dimensions of the shape, so that the indices in compiled code are simple. Its sizes come from
    `cz`: the compiler knows them, and would take a variable of the kernel for one that changes.
    """
    per_word = cz.shape[2]
    rows = (4, per_word // 8, 4, 2) if per_word >= 8 else (per_word // 2, 8 // per_word, per_word // 2, 2)
    bits = _bits(tiles, keys, step_sample, 4 * per_word * LANES)
    return cz.view(-1, *rows, LANES), bits.view(-1, *rows, LANES)


def _bits(tiles: Tensor, keys: Tensor, step_sample: Tensor, tile: int) -> Tensor:
    """Return the random bits of each element, in [0, 2^16): int32 [elements / PER_BLOCK, 4, 2, LANES]."""
    blocks = tile // PER_BLOCK
    numbers = (tiles.view(-1, 1) * blocks + torch.arange(blocks, dtype=torch.int32, device=tiles.device)).view(-1)
    words = random_words(numbers, keys.view(-1, 1).expand(-1, blocks).reshape(-1), step_sample)
    shifts = torch.arange(2, dtype=torch.int32, device=tiles.device).view(2, 1) * 16
    return (words >> shifts) & 0xFFFF


@torch.no_grad()
def round_(values: Tensor, span: Span, dtype: torch.dtype, direction: Direction) -> None:
    """Round the values of a span to those of `dtype` in place.

    Args:
        values: float32 [span.numel], contiguous.
        span: names the elements.
        dtype: bfloat16 or float16.
        direction: one of the step's: its seed and its step name the random bits.
    """
    device = span.segment.device
    computed = values if values.device == device else values.to(device)
    named = of_step(direction.step, ROUND, device)
    for chunk, part in span.split(call_size(MAX_ELEMENTS, device)):
        kernel(dtype, span.tile)(computed[chunk], part.tiles, part.keys(direction.seed), named)
    if computed is not values:
        values.copy_(computed)
