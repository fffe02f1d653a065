"""Counter-based noise: z as a function of (seed, step, sample, tensor name, element index), the same on every device.

`gaussian.py` and `rademacher.py` give the kernels, in which z is drawn (their `draw`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from mezo_cli.perturb.noise.compiled import describe_kernels
from mezo_cli.perturb.noise.direction import Direction
from mezo_cli.perturb.noise.kernels import KernelSet
from mezo_cli.perturb.noise.philox import stream_key

BLOCK = 1 << 17  # elements, a multiple of every tile: a block and a few buffers of its size stay in cache


class CounterNoise:
    """A noise that draws any part of z alone, inside the kernel that uses it. The methods are those of `Noise`.

    Args:
        kind: its name.
        kernels: its kernels, compiled once per process.
        scaled: (c, device) -> the small tensor from which the kernels make c z.
    """

    def __init__(self, kind: str, kernels: KernelSet, scaled: Callable[[float, torch.device], Tensor]) -> None:
        self.kind = kind
        self.block = BLOCK
        self._kernels = kernels
        self._scaled = scaled
        self._tile = kernels.tile

    def describe_kernels(self) -> tuple[str, str]:
        """Return how this process runs the kernels, and why they are slow: see `Noise.describe_kernels`."""
        return describe_kernels()

    def z(
        self,
        direction: Direction,
        name: str,
        shape: Sequence[int],
        device: torch.device | str,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Return elements [start, stop) of z for that tensor, float32 [stop - start], in row-major order."""
        stop = prod(shape) if stop is None else stop
        first, last = start // self._tile, -(-stop // self._tile)
        tiles = torch.arange(first, last, device=compute_device(torch.device(device)))
        z = self._draw_tiles(direction, name, tiles, 1.0).view(-1)
        return z[start - first * self._tile :][: stop - start].to(device)

    @torch.no_grad()
    def perturb(
        self,
        direction: Direction,
        name: str,
        theta: Tensor,
        c: float,
        out: Tensor,
        out_minus: Tensor | None = None,
    ) -> None:
        """Write out = theta + c z and, if given, out_minus = theta - c z: see `Noise.perturb`."""
        flat, device = _flat(theta), compute_device(theta.device)
        outs = [out.view(-1)] if out_minus is None else [out.view(-1), out_minus.view(-1)]
        if device == theta.device:
            self._perturb(direction, name, flat, c, outs)
            return
        computed = [torch.empty_like(target, device=device) for target in outs]
        self._perturb(direction, name, flat.to(device), c, computed)
        for target, value in zip(outs, computed, strict=True):
            target.copy_(value)

    def _perturb(self, direction: Direction, name: str, theta: Tensor, c: float, outs: list[Tensor]) -> None:
        """Run the kernel over flat tensors of the compute device; `outs` is [out] or [out, out_minus]."""
        device = theta.device
        kernel = self._kernels.perturb if len(outs) == 1 else self._kernels.perturb_pair
        rest = (*key_tensors(direction, name, device), self._scaled(c, device))
        for begin, end, length, tiles in self._chunks(theta.numel(), device):
            if end - begin == length:
                kernel(_slice(theta, begin, end), *(_slice(t, begin, end) for t in outs), tiles, *rest)
                continue
            padded = [torch.empty(length, dtype=outs[0].dtype, device=device) for _ in outs]
            kernel(_padded(theta[begin:end], length), *padded, tiles, *rest)
            for target, value in zip(outs, padded, strict=True):
                target[begin:end] = value[: end - begin]

    @torch.no_grad()
    def perturb_rows(
        self,
        direction: Direction,
        name: str,
        theta: Tensor,
        rows: Tensor,
        c: float,
        out: Tensor,
        out_minus: Tensor | None = None,
    ) -> None:
        """Write out[i] = theta[rows[i]] + c z[rows[i]], drawing z for these rows only: see `Noise.perturb_rows`."""
        width, device, tile = prod(theta.shape[1:]), compute_device(theta.device), self._tile
        aligned = width % tile == 0 or tile % width == 0
        tiles_per_row = max(1, width // tile) if aligned else (width + tile - 2) // tile + 1  # at most
        max_rows = max(1, self._max_tiles(device) // tiles_per_row)
        columns = torch.arange(width, device=device)
        for start in range(0, len(rows), max_rows):
            some = rows[start : start + max_rows]
            begin = some.to(device) * width
            first = begin // tile
            tiles = first[:, None] + torch.arange(tiles_per_row, device=device)
            cz = self._draw_tiles(direction, name, tiles.view(-1), c).view(len(some), tiles_per_row * tile)
            if tiles_per_row * tile != width:
                cz = cz.gather(1, (begin - first * tile)[:, None] + columns)
            values = theta[some]
            cz = cz.reshape(values.shape).to(theta.device)
            out[start : start + max_rows] = values + cz
            if out_minus is not None:
                out_minus[start : start + max_rows] = values - cz

    @torch.no_grad()
    def update_(
        self,
        name: str,
        theta: Tensor,
        terms: Sequence[tuple[Direction, float]],
        decays: Sequence[float],
        start: int = 0,
    ) -> None:
        """Apply theta <- decay theta + coefficient z for each term in order, in place: see `Noise.update_`.

        All terms are applied to one chunk of theta before the next, while it is in cache.
        """
        if start % self._tile:
            raise ValueError(f"an update starts at a multiple of {self._tile} elements, not at {start}")
        flat, device = _flat(theta), compute_device(theta.device)
        if device == theta.device:
            self._update(name, flat, terms, decays, start)
            return
        computed = flat.to(device, copy=True)
        self._update(name, computed, terms, decays, start)
        flat.copy_(computed)

    def _update(
        self,
        name: str,
        theta: Tensor,
        terms: Sequence[tuple[Direction, float]],
        decays: Sequence[float],
        start: int,
    ) -> None:
        """Run the kernels over a flat tensor of the compute device."""
        device = theta.device
        for begin, end, length, tiles in self._chunks(theta.numel(), device, start):
            whole = end - begin == length
            part = _slice(theta, begin, end) if whole else _padded(theta[begin:end], length)
            for (direction, coefficient), decay in zip(terms, decays, strict=True):
                rest = (*key_tensors(direction, name, device), self._scaled(coefficient, device))
                if np.float32(decay) == 1.0:
                    # the same bits: a float32 sum does not change when it is taken in float64 first
                    self._kernels.add(part, tiles, *rest)
                else:
                    self._kernels.decay(part, tiles, *rest, _decay_tensor(decay, device))
            if not whole:
                theta[begin:end] = part[: end - begin]

    def _draw_tiles(self, direction: Direction, name: str, tiles: Tensor, c: float) -> Tensor:
        """Return c z for the tiles of these numbers (int64 [T], on the compute device), float32 [T, tile]."""
        count, device = len(tiles), tiles.device
        if count % 2:  # an even number, so that no call is left with a single tile (see `_chunks`)
            tiles = torch.cat([tiles, tiles[-1:]])
        cz = torch.zeros(len(tiles), self._tile, device=device)
        rest = (*key_tensors(direction, name, device), self._scaled(c, device))
        max_tiles = self._max_tiles(device)
        for some, part in zip(tiles.split(max_tiles), cz.split(max_tiles), strict=True):
            self._kernels.add(part.view(-1), some, *rest)
        return cz[:count]

    def _max_tiles(self, device: torch.device) -> int:
        """Return the most tiles of one call of a kernel. Off the CPU the launches set it, not a cache."""
        return self._kernels.max_tiles * (1 if device.type == "cpu" else 16)

    def _chunks(self, n: int, device: torch.device, start: int = 0) -> Iterator[tuple[int, int, int, Tensor]]:
        """Cut [0, n) into chunks: yield (begin, end, elements of the tiles that cover it, their numbers).

        Element 0 is element `start` of the tensor, the first of a tile. A chunk has at least two tiles, because what
        is compiled for any number of tiles is not compiled for exactly one.
        """
        max_elements = self._max_tiles(device) * self._tile
        for begin in range(0, n, max_elements):
            end = min(n, begin + max_elements)
            first = (start + begin) // self._tile
            last = max(first + 2, -(-(start + end) // self._tile))
            numbers = _tile_numbers(max(4096, 1 << (last - 1).bit_length()), device)
            yield begin, end, (last - first) * self._tile, numbers[first:last]


def compute_device(device: torch.device) -> torch.device:
    """Return the device on which noise for `device` is computed: MPS has no float64, so its noise is on the CPU."""
    return torch.device("cpu") if device.type == "mps" else device


# Small tensors that kernels read. They are cached: to make one takes longer than a kernel takes on a small tensor.
# Never in inference mode, whatever the caller's: inference tensors would make the kernels compile once more.


def key_tensors(direction: Direction, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what a kernel draws z from: the key of (seed, name), and (step, sample); int64 [2] each."""
    return _key(direction.seed, name, device), _step_sample(direction.step, direction.sample, device)


@lru_cache(maxsize=8192)
@torch.inference_mode(False)
def _key(seed: int, name: str, device: torch.device) -> Tensor:
    return _pair(*stream_key(seed, name), device)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _step_sample(step: int, sample: int, device: torch.device) -> Tensor:
    return _pair(step, sample, device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _tile_numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _decay_tensor(decay: float, device: torch.device) -> Tensor:
    return torch.full((), round_to_float32(decay), dtype=torch.float64, device=device)


def _pair(first: int, second: int, device: torch.device) -> Tensor:
    """Return int64 [2]. It is filled on the device: a copy from the host would wait for it."""
    pair = torch.full((2,), second, device=device)
    pair[:1].fill_(first)
    return pair


def round_to_float32(value: float) -> float:
    """Return the nearest float32; a value out of range becomes infinite."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _flat(theta: Tensor) -> Tensor:
    if theta.dtype != torch.float32:
        raise TypeError(f"theta is {theta.dtype}: noise is added to float32 tensors only")
    return theta.detach().view(-1)  # not reshape: what is written to a copy would be lost


def _slice(flat: Tensor, begin: int, end: int) -> Tensor:
    return flat if begin == 0 and end == flat.numel() else flat[begin:end]


def _padded(part: Tensor, length: int) -> Tensor:
    whole = torch.zeros(length, device=part.device)
    whole[: part.numel()] = part
    return whole
