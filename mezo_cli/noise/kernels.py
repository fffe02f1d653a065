"""The fused passes, written once in tensor operations: torch.compile makes C++ or Triton of them, or they run as is.

A tensor is cut into *tiles* of 4 * per_word * LANES elements. Lane l of tile t reads Philox block t * LANES + l, whose
four words serve the same lane of all the tile's rows: neighbours in memory read neighbouring words, which is what a
vector unit wants, and a kernel is two loops, one over words and one over elements, that compute no block twice.

No fused multiply-add can change a bit, so every device computes the same: kernels add the *rounded* product coeff * z
(an entry of a scaled table, or +-coeff), and take decay * theta in float64, where that product is exact.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mezo_cli.noise.philox import MASK, philox

LANES = 32  # a vector of bfloat16 holds 32


def _words(tiles: Tensor, key: Tensor, at: Tensor) -> Tensor:
    """int32 [T, 4, 1, LANES]: the words of the tiles numbered `tiles` (int64 [T]), of `at` (step, sample)."""
    block = tiles.view(-1, 1) * LANES + torch.arange(LANES, device=tiles.device)
    words = philox(block & MASK, block >> 32, at[0], at[1], key[0], key[1])
    return torch.stack([word.to(torch.int32) for word in words])[:, :, None].transpose(0, 1)


def gaussian(tiles: Tensor, key: Tensor, at: Tensor, table: Tensor) -> Tensor:
    """float32 [T, 4, 2, LANES]: an entry of `table` (float32 [65536]: coeff times the quantiles) for each 16 bits."""
    half = torch.arange(2, dtype=torch.int32, device=tiles.device).view(2, 1) * 16
    return table[(_words(tiles, key, at) >> half) & 0xFFFF]


def rademacher(tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor) -> Tensor:
    """float32 [T, 4, 32, LANES]: +coeff for a set bit, else -coeff."""
    bit = torch.arange(32, dtype=torch.int32, device=tiles.device).view(32, 1)
    return torch.where((_words(tiles, key, at) >> bit) & 1 != 0, coeff, -coeff)


def gaussian_shift(theta: Tensor, out: Tensor, tiles: Tensor, key: Tensor, at: Tensor, table: Tensor) -> None:
    """out = theta + table[bits]; theta, out [T * tile]."""
    _store(out, theta, gaussian(tiles, key, at, table))


def gaussian_add(theta: Tensor, tiles: Tensor, key: Tensor, at: Tensor, table: Tensor) -> None:
    """theta <- theta + table[bits]."""
    _store(theta, theta, gaussian(tiles, key, at, table))


def gaussian_decay(theta: Tensor, tiles: Tensor, key: Tensor, at: Tensor, table: Tensor, decay: Tensor) -> None:
    """theta <- decay * theta + table[bits], rounded once; decay float64 []."""
    _store_decayed(theta, decay, gaussian(tiles, key, at, table))


def rademacher_shift(theta: Tensor, out: Tensor, tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor) -> None:
    """out = theta +- coeff; theta, out [T * tile]."""
    _store(out, theta, rademacher(tiles, key, at, coeff))


def rademacher_add(theta: Tensor, tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor) -> None:
    """theta <- theta +- coeff."""
    _store(theta, theta, rademacher(tiles, key, at, coeff))


def rademacher_decay(theta: Tensor, tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor, decay: Tensor) -> None:
    """theta <- decay * theta +- coeff, rounded once; decay float64 []."""
    _store_decayed(theta, decay, rademacher(tiles, key, at, coeff))


def _store(out: Tensor, theta: Tensor, step: Tensor) -> None:
    out.view(step.shape).copy_(theta.view(step.shape) + step)


def _store_decayed(theta: Tensor, decay: Tensor, step: Tensor) -> None:
    view = theta.view(step.shape)
    view.copy_(view.double() * decay + step.double())


class Kernel:
    """One pass over whole tiles, two at least: compiled at its first call, eager where there is no compiler.

    The environment's MEZO_EAGER=1 asks for the eager path: the same bits, some 20 times slower.

    Args:
        function: one of the passes above; its first `arrays` arguments have an element for each of the tiles'.
        tile: elements a tile.
        at_once: tiles a call is given at most.
    """

    broken = False  # shared: one failed compilation is enough to know that there is no compiler

    def __init__(self, function: Callable[..., None], arrays: int, tile: int, at_once: int) -> None:
        self.function, self.arrays, self.tile, self.at_once = function, arrays, tile, at_once
        self._compiled: dict[tuple[torch.device, torch.dtype], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Run the pass: the arrays, then `tiles` (int64 [T], T > 1), then the rest of the function's arguments."""
        last = tensors[self.arrays - 1]
        compiled = self._compiled.get((last.device, last.dtype))
        if compiled is None or _eager():
            compiled = self._compile(*tensors)
        compiled(*tensors)

    def _compile(self, *tensors: Tensor) -> Callable[..., None]:
        if Kernel.broken or _eager():
            return self.function
        # Indices into the table are masked, so nothing needs to check them.
        options: dict[str, Any] = {"assert_indirect_indexing": False}
        compiled = torch.compile(self.function, dynamic=True, fullgraph=True, options=options)
        try:
            # The compiler decides by the first sizes that it sees whether threads are worth their while: it is shown
            # the largest. That also makes sure that a failure leaves the caller's tensors as they were.
            arrays, tiles = tensors[: self.arrays], tensors[self.arrays]
            shown = [torch.empty(self.at_once * self.tile, dtype=a.dtype, device=a.device) for a in arrays]
            compiled(*shown, torch.arange(self.at_once, device=tiles.device), *tensors[self.arrays + 1 :])
        except Exception as error:  # a compiler fails in many ways that torch has no common type for
            Kernel.broken = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the noise is not compiled, and some 20 times slower: {reason}", stacklevel=5)
            return self.function
        last = tensors[self.arrays - 1]
        self._compiled[last.device, last.dtype] = compiled
        return compiled


def _eager() -> bool:
    return os.environ.get("MEZO_EAGER", "") not in ("", "0")
