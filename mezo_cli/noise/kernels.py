"""The fused passes, written once in tensor operations: torch.compile makes C++ or Triton of them, or they run as is.

A tensor is cut into *tiles* of 4 * per_word * LANES elements. Lane l of tile t reads Philox block t * LANES + l, whose
four words serve the same lane of all the tile's rows: neighbours in memory read neighbouring words, which is what a
vector unit wants, and a kernel is two loops, one over words and one over elements, that compute no block twice.

No fused multiply-add can change a bit, so every device computes the same: kernels add the *rounded* product coeff * z
(an entry of a scaled table, or +-coeff), and take decay * theta in float64, where that product is exact.
"""

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
    codes = (_words(tiles, key, at) >> half) & 0xFFFF
    # not table[codes]: an embedding's compiled code does not look for negative indices, and takes 0.6 of the time
    return torch.nn.functional.embedding(codes, table.view(-1, 1)).squeeze(-1)


def rademacher(tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor) -> Tensor:
    """float32 [T, 4, 32, LANES]: +coeff for a set bit, else -coeff."""
    bit = torch.arange(32, dtype=torch.int32, device=tiles.device).view(32, 1)
    return torch.where((_words(tiles, key, at) >> bit) & 1 != 0, coeff, -coeff)


def gaussian_shift(theta: Tensor, out: Tensor, tiles: Tensor, key: Tensor, at: Tensor, table: Tensor) -> None:
    """out = theta + table[bits]; theta, out [T * tile]."""
    _store(out, theta, gaussian(tiles, key, at, table))


def gaussian_mirrored(
    theta: Tensor, out: Tensor, mirror: Tensor, tiles: Tensor, key: Tensor, at: Tensor, table: Tensor
) -> None:
    """out = theta + table[bits], mirror = theta - table[bits], of the same bits; all [T * tile]."""
    _store_both(out, mirror, theta, gaussian(tiles, key, at, table))


def gaussian_add(theta: Tensor, tiles: Tensor, key: Tensor, at: Tensor, table: Tensor) -> None:
    """theta <- theta + table[bits]."""
    _store(theta, theta, gaussian(tiles, key, at, table))


def gaussian_decay(theta: Tensor, tiles: Tensor, key: Tensor, at: Tensor, table: Tensor, decay: Tensor) -> None:
    """theta <- decay * theta + table[bits], rounded once; decay float64 []."""
    _store_decayed(theta, decay, gaussian(tiles, key, at, table))


def rademacher_shift(theta: Tensor, out: Tensor, tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor) -> None:
    """out = theta +- coeff; theta, out [T * tile]."""
    _store(out, theta, rademacher(tiles, key, at, coeff))


def rademacher_mirrored(
    theta: Tensor, out: Tensor, mirror: Tensor, tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor
) -> None:
    """out = theta +- coeff, mirror = theta -+ coeff, of the same bits; all [T * tile]."""
    _store_both(out, mirror, theta, rademacher(tiles, key, at, coeff))


def rademacher_add(theta: Tensor, tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor) -> None:
    """theta <- theta +- coeff."""
    _store(theta, theta, rademacher(tiles, key, at, coeff))


def rademacher_decay(theta: Tensor, tiles: Tensor, key: Tensor, at: Tensor, coeff: Tensor, decay: Tensor) -> None:
    """theta <- decay * theta +- coeff, rounded once; decay float64 []."""
    _store_decayed(theta, decay, rademacher(tiles, key, at, coeff))


def _store(out: Tensor, theta: Tensor, step: Tensor) -> None:
    out.view(step.shape).copy_(theta.view(step.shape) + step)


def _store_both(out: Tensor, mirror: Tensor, theta: Tensor, step: Tensor) -> None:
    here = theta.view(step.shape)
    out.view(step.shape).copy_(here + step)
    mirror.view(step.shape).copy_(here - step)


def _store_decayed(theta: Tensor, decay: Tensor, step: Tensor) -> None:
    view = theta.view(step.shape)
    view.copy_(view.double() * decay + step.double())
