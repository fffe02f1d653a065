"""The two fused passes, written once in tensor operations: torch.compile makes C++ or Triton of them, or they run so.

A tensor is cut into *tiles* of `words * per_word * LANES` elements. Lane l of tile t reads Philox block
`t * LANES + l`, whose four words serve the same lane of all the tile's rows: rows of 32 neighbours read neighbouring
words, which is what a vector unit wants. So a kernel is two loops, the words and then the elements, and no block is
computed twice.

All arithmetic is chosen so that no fused multiply-add can change a bit: the caller hands in the *rounded* product
coeff * z (as a scaled table, or as +-coeff), and decay * theta + that is taken in float64, where the product is exact.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezo_cli.noise.philox import MASK, philox

LANES = 32
GAUSSIAN_TILE = 8 * LANES  # two elements a word
RADEMACHER_TILE = 128 * LANES  # 32 elements a word


def _words(counter: Tensor, tiles: Tensor) -> Tensor:
    """int32 [T, 4, 1, LANES]: the words of `tiles` + counter[4]; counter is (key0, key1, step, sample, first tile)."""
    lanes = torch.arange(LANES, device=tiles.device)
    block = (tiles + counter[4]).view(-1, 1) * LANES + lanes
    words = philox(block & MASK, block >> 32, counter[2], counter[3], counter[0], counter[1])
    return torch.stack([word.to(torch.int32) for word in words])[:, :, None].transpose(0, 1)


def _gaussian(counter: Tensor, tiles: Tensor, table: Tensor) -> Tensor:
    half = torch.arange(2, dtype=torch.int32, device=tiles.device).view(2, 1) * 16
    return table[(_words(counter, tiles) >> half) & 0xFFFF]


def _rademacher(counter: Tensor, tiles: Tensor, coeff: Tensor) -> Tensor:
    bit = torch.arange(32, dtype=torch.int32, device=tiles.device).view(32, 1)
    return torch.where((_words(counter, tiles) >> bit) & 1 != 0, coeff, -coeff)


def gaussian_shift(theta: Tensor, out: Tensor, counter: Tensor, tiles: Tensor, table: Tensor) -> None:
    """out[T * GAUSSIAN_TILE] = theta + table[bits], rounded into out.dtype."""
    step = _gaussian(counter, tiles, table)
    out.view(step.shape).copy_(theta.view(step.shape) + step)


def gaussian_update(theta: Tensor, decay: Tensor, counter: Tensor, tiles: Tensor, table: Tensor) -> None:
    """theta <- decay * theta + table[bits], in float64 and rounded once (decay: float64)."""
    step = _gaussian(counter, tiles, table)
    view = theta.view(step.shape)
    view.copy_(view.double() * decay + step.double())


def rademacher_shift(theta: Tensor, out: Tensor, counter: Tensor, tiles: Tensor, coeff: Tensor) -> None:
    """out[T * RADEMACHER_TILE] = theta +- coeff, rounded into out.dtype."""
    step = _rademacher(counter, tiles, coeff)
    out.view(step.shape).copy_(theta.view(step.shape) + step)


def rademacher_update(theta: Tensor, decay: Tensor, counter: Tensor, tiles: Tensor, coeff: Tensor) -> None:
    """theta <- decay * theta +- coeff, in float64 and rounded once (decay: float64)."""
    step = _rademacher(counter, tiles, coeff)
    view = theta.view(step.shape)
    view.copy_(view.double() * decay + step.double())


class Kernel:
    """A pass that is compiled at its first call, once a process and kind of device; eager where that cannot be.

    The environment's MEZO_EAGER=1 asks for the eager path: the same bits, 20 times slower.
    """

    broken = False  # shared: one failed compilation is enough to know that there is no compiler

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.compiled: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Run the pass on `tensors`."""
        if Kernel.broken or os.environ.get("MEZO_EAGER", "") not in ("", "0"):
            self.function(*tensors)
        elif self.compiled is not None:
            self.compiled(*tensors)
        else:
            self._first(*tensors)

    def _first(self, *tensors: Tensor) -> None:
        # the in-place pass may not run twice, but nothing has run when a compilation fails
        options: dict[str, Any] = {"assert_indirect_indexing": False}  # indices are masked to the table's length
        compiled = torch.compile(self.function, dynamic=True, fullgraph=True, options=options)
        try:
            compiled(*tensors)
        except Exception as error:  # any failure of a compiler, which torch does not give one type
            Kernel.broken = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"noise is not compiled and about 20 times slower: {reason}", stacklevel=4)
            self.function(*tensors)
        else:
            self.compiled = compiled
