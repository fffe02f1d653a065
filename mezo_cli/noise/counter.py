"""Gaussian and Rademacher directions from the counter-based generator."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from mezo_cli.noise import kernels
from mezo_cli.noise.compiled import Kernel
from mezo_cli.noise.direction import Direction
from mezo_cli.noise.kernels import LANES
from mezo_cli.noise.philox import stream_key

CODES = 1 << 16  # entries of the gaussian table
BLOCK = 1 << 17  # elements, a multiple of every tile: with a few buffers of its size beside it a block stays in cache
PASSES = ("shift", "mirrored", "add", "decay")


@dataclass(frozen=True)
class Family:
    """How one kind's z is laid out, and its passes. They are compiled once a process, so they are made once."""

    tile: int  # elements
    at_once: int  # tiles a call works on, so that their words stay in cache
    shift: Kernel
    mirrored: Kernel
    add: Kernel
    decay: Kernel


def _family(per_word: int, at_once: int, *functions: Callable[..., None]) -> Family:
    tile = 4 * per_word * LANES
    arrays = (2, 3, 1, 1)
    kernels = (Kernel(f, n, tile, at_once) for f, n in zip(functions, arrays, strict=True))
    return Family(tile, at_once, *kernels)


FAMILIES = {
    kind: _family(per_word, at_once, *(getattr(kernels, f"{kind}_{name}") for name in PASSES))
    for kind, per_word, at_once in (("gaussian", 2, 4096), ("rademacher", 32, 1024))
}


@lru_cache(maxsize=1)
def gaussian_table() -> Tensor:
    """float32 [65536]: the quantiles of N(0, 1) at (i + 1/2) / 65536, scaled so that their variance is 1.

    Entry 65535 - i is entry i with its sign flipped, so the mean is 0. The largest is 4.325. From Python's own
    `NormalDist` (Wichura's AS 241, in float64), rounded to float32.
    """
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse(0.5 + (i + 0.5) / CODES) for i in range(CODES // 2)])
    upper /= np.sqrt(np.mean(upper**2))
    return torch.from_numpy(np.concatenate([-upper[::-1], upper]).astype(np.float32))


class CounterNoise:
    """z as a function of (seed, step, sample, tensor name, element index), the same bits on every device.

    Args:
        kind: "gaussian" (a table of quantiles by 16 generator bits) or "rademacher" (+1 or -1 by one bit).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.block = BLOCK
        self._family = FAMILIES[kind]
        self._tile = self._family.tile

    def z(
        self,
        at: Direction,
        name: str,
        shape: Sequence[int],
        device: torch.device | str,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Return elements [start, stop) of z for that tensor, float32 [stop - start], row-major order."""
        stop = prod(shape) if stop is None else stop
        first, last = start // self._tile, -(-stop // self._tile)
        tiles = torch.arange(first, last, device=_home(torch.device(device)))
        steps = self._steps(at, name, tiles, 1.0).view(-1)
        return steps[start - first * self._tile :][: stop - start].to(device)

    @torch.no_grad()
    def shift(
        self, at: Direction, name: str, theta: Tensor, c: float, out: Tensor, mirror: Tensor | None = None
    ) -> None:
        """out = theta + c z, where c z is rounded to float32, the sum to float32, and that to out.dtype.

        Args:
            at: the direction.
            name: the tensor's name in the model.
            theta: float32, contiguous, any shape.
            c: the coefficient (rounded to float32).
            out: float32 or bfloat16, contiguous, as many elements; may not overlap theta.
            mirror: like out; where given, it becomes theta - c z, of the same z drawn once.
        """
        source, home = _flat(theta), _home(theta.device)
        targets = [out.view(-1)] if mirror is None else [out.view(-1), mirror.view(-1)]
        if home != theta.device:
            moved = [torch.empty_like(target, device=home) for target in targets]
            self.shift(at, name, source.to(home), c, *moved)
            for target, there in zip(targets, moved, strict=True):
                target.copy_(there)
            return
        kernel = self._family.shift if mirror is None else self._family.mirrored
        rest = (*_names(at, name, home), _scaled(self.kind, c, home))
        for begin, end, length, tiles in self._chunks(source.numel(), home):
            if end - begin == length:
                kernel(_cut(source, begin, end), *(_cut(t, begin, end) for t in targets), tiles, *rest)
                continue
            shifted = [torch.empty(length, dtype=out.dtype, device=home) for _ in targets]
            kernel(_padded(source[begin:end], length), *shifted, tiles, *rest)
            for target, there in zip(targets, shifted, strict=True):
                target[begin:end] = there[: end - begin]

    @torch.no_grad()
    def shift_rows(
        self,
        at: Direction,
        name: str,
        theta: Tensor,
        rows: Tensor,
        c: float,
        out: Tensor,
        mirror: Tensor | None = None,
    ) -> None:
        """out[i] = theta[rows[i]] + c z[rows[i]]: the rows of `shift`'s result, without the rest of the table.

        Args:
            at: the direction.
            name: the tensor's name in the model.
            theta: float32 [V, ...], contiguous.
            rows: int64 [R], each in [0, V).
            c: the coefficient (rounded to float32).
            out: float32 or bfloat16 [R, ...].
            mirror: like out; where given, it becomes theta[rows[i]] - c z[rows[i]].
        """
        width, home, tile = prod(theta.shape[1:]), _home(theta.device), self._tile
        aligned = width % tile == 0 or tile % width == 0
        covering = max(1, width // tile) if aligned else (width + tile - 2) // tile + 1  # tiles that a row may touch
        at_once = max(1, self._family.at_once // covering)
        inside = torch.arange(width, device=home)
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            begin = some.to(home) * width
            first = begin // tile
            tiles = first[:, None] + torch.arange(covering, device=home)
            steps = self._steps(at, name, tiles.view(-1), c).view(len(some), covering * tile)
            if covering * tile != width:
                steps = steps.gather(1, (begin - first * tile)[:, None] + inside)
            here = theta[some]
            steps = steps.reshape(here.shape).to(theta.device)
            out[start : start + at_once] = here + steps
            if mirror is not None:
                mirror[start : start + at_once] = here - steps

    @torch.no_grad()
    def update_(
        self,
        name: str,
        theta: Tensor,
        terms: Sequence[tuple[Direction, float]],
        decays: Sequence[float],
        start: int = 0,
    ) -> None:
        """theta <- decay * theta + coeff * z for each term in order, chunk by chunk: as one call a term, bit for bit.

        coeff and decay are rounded to float32, then coeff * z is, and the sum with the exact decay * theta is taken
        in float64 and rounded to float32.

        Args:
            name: the tensor's name in the model.
            theta: float32, contiguous, any shape; changed in place.
            terms: (direction, coeff), in order.
            decays: one a term.
            start: where theta begins in the tensor: 0, or a multiple of `block` where it is a part of it.
        """
        assert start % self._tile == 0
        flat, home = _flat(theta), _home(theta.device)
        if home != theta.device:
            moved = flat.to(home)
            self.update_(name, moved, terms, decays, start)
            flat.copy_(moved)
            return
        for begin, end, length, tiles in self._chunks(flat.numel(), home, start):
            whole = end - begin == length
            part = _cut(flat, begin, end) if whole else _padded(flat[begin:end], length)
            for (at, coeff), decay in zip(terms, decays, strict=True):
                rest = (*_names(at, name, home), _scaled(self.kind, coeff, home))
                if np.float32(decay) == 1.0:
                    # the same bits: a float32 sum does not change when it is taken in float64 first
                    self._family.add(part, tiles, *rest)
                else:
                    self._family.decay(part, tiles, *rest, _decay(decay, home))
            if not whole:
                flat[begin:end] = part[: end - begin]

    def _steps(self, at: Direction, name: str, tiles: Tensor, c: float) -> Tensor:
        """float32 [T, tile]: c z of the tiles numbered `tiles`."""
        count, home = len(tiles), tiles.device
        if count % 2:  # an even number, so that no call is left with a single tile (see `_chunks`)
            tiles = torch.cat([tiles, tiles[-1:]])
        steps = torch.zeros(len(tiles), self._tile, device=home)
        rest = (*_names(at, name, home), _scaled(self.kind, c, home))
        for some, part in zip(tiles.split(self._family.at_once), steps.split(self._family.at_once), strict=True):
            self._family.add(part.view(-1), some, *rest)
        return steps[:count]

    def _chunks(self, n: int, home: torch.device, start: int = 0) -> Iterator[tuple[int, int, int, Tensor]]:
        """Cut [0, n): (begin, end, length of the tiles that cover it, their numbers), two tiles at least.

        Element 0 is element `start` of the tensor, the first of a tile.

        Two, because what is compiled for any number of tiles is not compiled for exactly one.
        """
        at_once = self._family.at_once * self._tile
        if home.type != "cpu":
            at_once *= 16  # there it is not a cache that sets the size, but the time to launch
        for begin in range(0, n, at_once):
            end = min(n, begin + at_once)
            first = (start + begin) // self._tile
            last = max(first + 2, -(-(start + end) // self._tile))
            numbers = _tile_numbers(max(4096, 1 << (last - 1).bit_length()), home)
            yield begin, end, (last - first) * self._tile, numbers[first:last]


# Small tensors that kernels read. They are kept: making one takes longer than a kernel does with a small tensor.
# Not in inference mode, whatever the caller's: what is made there is of another kind, compiled for once more.


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _tile_numbers(count: int, home: torch.device) -> Tensor:
    return torch.arange(count, device=home)


@lru_cache(maxsize=8192)
@torch.inference_mode(False)
def _key(seed: int, name: str, home: torch.device) -> Tensor:
    return torch.tensor(stream_key(seed, name), device=home)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _at(step: int, sample: int, home: torch.device) -> Tensor:
    return torch.tensor([step, sample], device=home)


def _names(at: Direction, name: str, home: torch.device) -> tuple[Tensor, Tensor]:
    return _key(at.seed, name, home), _at(at.step, at.sample, home)


@lru_cache(maxsize=64)  # 16 MB of scaled tables, for a replay of as many terms
@torch.inference_mode(False)
def _scaled(kind: str, c: float, home: torch.device) -> Tensor:
    """What a kernel adds: c z for each code of 16 bits, float32 [65536], or c, float32 []."""
    coeff = torch.tensor(c, dtype=torch.float32)
    return (gaussian_table() * coeff if kind == "gaussian" else coeff).to(home)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _decay(decay: float, home: torch.device) -> Tensor:
    return torch.tensor(np.float32(decay).item(), dtype=torch.float64, device=home)


def _flat(theta: Tensor) -> Tensor:
    if theta.dtype != torch.float32:
        raise TypeError(f"theta is {theta.dtype}: the noise moves float32 tensors only")
    return theta.detach().view(-1)  # not reshape: a copy would swallow what is written


def _cut(flat: Tensor, begin: int, end: int) -> Tensor:
    return flat if begin == 0 and end == flat.numel() else flat[begin:end]


def _padded(part: Tensor, length: int) -> Tensor:
    whole = torch.zeros(length, device=part.device)
    whole[: part.numel()] = part
    return whole


def _home(device: torch.device) -> torch.device:
    """Where a device's noise is computed: MPS has no float64, so its tensors go by way of the CPU."""
    return torch.device("cpu") if device.type == "mps" else device
