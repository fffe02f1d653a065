"""The five kernels of a counter-based noise: layout of the random words in tiles, and the operations on a tile.

They are written in tensor operations, which define the bits. `Kernel` runs them as they are, or what is compiled of
`simd.cpp` for a CPU and of `gpu.py` for a GPU, which hold them once more.

A tensor is cut into *tiles* of 4 * per_word * LANES elements. Lane l of tile t reads Philox block t * LANES + l. The
block's four words serve the same lane of all rows of the tile: neighbours in memory read neighbouring words, which is
what vector units need, and no block is computed twice.

No fused multiply-add can change a bit, so every device computes the same: the kernels add the *rounded* product c z
(an entry of a scaled table, or +-c), and multiply theta in float64 by a number that is a float32: an exact product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import _lru_cache_wrapper, lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from mezo_cli.perturb.noise.compiled import Kernel, compile_native
from mezo_cli.perturb.noise.spans import compute_device

LANES = 32  # a vector register holds 32 bfloat16 values
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
DEVICE_BLOCK = 1 << 25  # off the CPU launches set the size of a block and of a call, and not a cache

# (tiles, keys, step_sample, scaled) -> c z, float32 [T, 4, per_word, LANES]; `scaled` depends on the kind and on c.
# Kernels take what they read and write, then these four, then what theta is multiplied by.
Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class KernelSet:
    """The kernels of one kind of noise. They are compiled once per process, so one set is made per kind."""

    tile: int  # elements
    max_tiles: int  # tiles per call on a CPU, so that their words stay in cache
    draw: Draw
    native: str  # the kind in simd.cpp and gpu.py, if it is there
    perturb: Kernel  # out = theta + c z
    perturb_pair: Kernel  # out = theta + c z, out_minus = theta - c z
    add: Kernel  # theta <- theta + c z
    decay: Kernel  # theta <- decay theta + c z
    shrink: Kernel  # theta <- theta - d theta + c z


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Return the four words of each (counter, key) by Philox4x32-10, int64: only their *low* 32 bits are meaningful.

    Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). There is no state, so any word
    can be computed alone, in any order, on any device.

    Args:
        c0, c1, c2, c3: the counter's words, int64 with zero high halves; they broadcast with each other and the key.
        k0, k1: the key's words, likewise; only their low halves are read.
    """
    for r in range(ROUNDS):
        # Products wrap at 64 bits and >> repeats the sign, so high halves are arbitrary. Only c0 and c2, which are
        # multiplied next, need zero high halves: no other operation moves high bits to the low half.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) ^ c1 ^ (k0 + WEYL[0] * r)) & MASK,
            p1,
            ((p0 >> 32) ^ c3 ^ (k1 + WEYL[1] * r)) & MASK,
            p0,
        )
    return c0, c1, c2, c3


def random_words(tiles: Tensor, keys: Tensor, step_sample: Tensor) -> Tensor:
    """Return the random words of some tiles, int32 [T, 4, 1, LANES].

    Args:
        tiles: the number of each tile in its tensor, int32 [T].
        keys: `spans.packed_key` of its tensor, int64 [T].
        step_sample: step and sample of the direction, int64 [2].
    """
    block = tiles.to(torch.int64).view(-1, 1) * LANES + torch.arange(LANES, device=tiles.device)
    key = keys.view(-1, 1)
    words = philox(block & MASK, block >> 32, step_sample[0], step_sample[1], key, key >> 32)
    return torch.stack([word.to(torch.int32) for word in words])[:, :, None].transpose(0, 1)


def call_size(on_cpu: int, device: torch.device) -> int:
    """Return how many elements to process at once, given that number for a CPU."""
    return on_cpu if device.type == "cpu" else max(on_cpu, DEVICE_BLOCK)


def step_sample(step: int, sample: int, device: torch.device) -> Tensor:
    """Return step and sample of a direction as kernels read them: int64 [2], made on the device.

    A copy from the host would wait for it.
    """
    pair = torch.full((2,), sample, device=device)
    pair[:1].fill_(step)
    return pair


def keep(make: Callable[..., Tensor], most: int) -> "_lru_cache_wrapper[Tensor]":
    """Return `make`, which makes a small tensor that kernels read, with the `most` last ones kept.

    To make one takes longer than such a kernel. Never in inference mode, whatever the caller's: inference tensors would
    make the kernels compile once more.
    """
    return lru_cache(maxsize=most)(torch.inference_mode(False)(make))


def subtract_fraction(theta: Tensor, d: Tensor | float) -> Tensor:
    """Return theta - d theta in float64, the weight decay of one step; d is a float32, so that d theta is exact."""
    wide = theta.double()
    return wide - wide * d


def decay_number(decay: float, in_float64: bool) -> float | None:
    """Return what theta is multiplied by, a float32: 1 - decay in float64, else decay; None where nothing decays."""
    number = float(np.float32(1.0 - decay if in_float64 else decay))
    return None if number == (0.0 if in_float64 else 1.0) else number


def add_to_decayed(theta: Tensor, term: Tensor, decay: float, in_float64: bool) -> Tensor:
    """Return decay theta + term, bitwise identical to `Noise.update_`, float32, of any shape, without a kernel."""
    number, device = decay_number(decay, in_float64), compute_device(theta.device)
    if number is None:
        return theta + term
    wide = theta.to(device)
    decayed = subtract_fraction(wide, number) if in_float64 else wide.double() * number
    return decayed.add_(term.to(device)).float().to(theta.device)


def make_kernels(draw: Draw, per_word: int, max_tiles: int, native: str = "") -> KernelSet:
    """Return the kernels of a kind of noise.

    Args:
        draw: returns c z for some tiles.
        per_word: how many elements one random word serves.
        max_tiles: tiles per call on a CPU.
        native: the kind in simd.cpp and gpu.py, if it is there.
    """

    def perturb(theta: Tensor, *tensors: Tensor) -> None:
        *outs, tiles, keys, step_sample, scaled = tensors  # one output, or two
        cz = draw(tiles, keys, step_sample, scaled)
        for sign, out in zip((1, -1), outs, strict=False):
            out.view(cz.shape).copy_(torch.add(theta.view(cz.shape), cz, alpha=sign))

    def add(theta: Tensor, *drawn: Tensor) -> None:
        cz = draw(*drawn)
        view = theta.view(cz.shape)
        view.copy_(view + cz)

    def decay(theta: Tensor, *inputs: Tensor) -> None:
        *drawn, factor = inputs
        cz = draw(*drawn)
        view = theta.view(cz.shape)
        view.copy_(view.double() * factor + cz.double())

    def shrink(theta: Tensor, *inputs: Tensor) -> None:
        *drawn, fraction = inputs
        cz = draw(*drawn)
        view = theta.view(cz.shape)
        view.copy_(subtract_fraction(view, fraction) + cz.double())

    tile = 4 * per_word * LANES
    kernels = [  # in simd.cpp and gpu.py the operations have the names of these functions
        Kernel(function, arrays, tile, max_tiles, partial(compile_native, native, function.__name__, tile))
        for function, arrays in ((perturb, 2), (perturb, 3), (add, 1), (decay, 1), (shrink, 1))
    ]
    return KernelSet(tile, max_tiles, draw, native, *kernels)
