"""Counter-based noise: z as a function of (seed, step, sample, tensor name, element index), the same on every device.

Gaussian: each element of z is a quantile of N(0, 1), looked up in a table by 16 random bits. Rademacher: each element
is +1 or -1, by one random bit.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction, Shape, Terms, to_float32
from mezo_cli.perturb.noise.compiled import describe_kernels, instruction_set
from mezo_cli.perturb.noise.kernels import (
    KernelSet,
    call_size,
    decay_number,
    keep,
    make_kernels,
    random_words,
    step_sample,
)
from mezo_cli.perturb.noise.rounding import MAX_ELEMENTS, ROUND, of_step, update_kernel
from mezo_cli.perturb.noise.spans import Span, compute_device, packed_key

Device = torch.device | str
CODES = 1 << 16  # entries of the table of quantiles
BLOCK = 1 << 17  # elements, a multiple of every tile: a block and a few buffers of its size stay in cache


_same_keys = keep(
    lambda seed, name, count, device: torch.full((count,), packed_key(seed, name), dtype=torch.int64, device=device),
    256,
)
_numbers = keep(lambda count, device: torch.arange(count, device=device), 64)


class CounterNoise:
    """A noise that draws any part of z alone, inside the kernel that uses it. The methods are those of `Noise`.

    Args:
        kernels: compiled once per process.
        scaled: (c, device) -> the small tensor from which the kernels make c z.
    """

    has_factors = False
    describe_kernels = staticmethod(describe_kernels)  # all kernels of a process run alike

    def __init__(self, name: str, kernels: KernelSet, scaled: Callable[[float, torch.device], Tensor]) -> None:
        instruction_set()  # an unknown one is refused before anything is computed
        self.name = name
        self.tile = kernels.tile
        self.block = BLOCK
        self._kernels, self._per_call = kernels, kernels.max_tiles * kernels.tile  # elements, on a CPU
        self._directions, self._scaled = keep(step_sample, 1024), keep(scaled, 64)
        self._scaled_for_forwards = keep(scaled, 2)  # eps is the same in every step
        self._decays = keep(partial(coefficient, dtype=torch.float64), 64)

    def z(
        self, direction: Direction, name: str, shape: Shape, device: Device, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return elements [start, stop) of z for that tensor, float32 [stop - start], in row-major order."""
        stop = prod(shape) if stop is None else stop
        first, last = start // self.tile, -(-stop // self.tile)
        tiles = torch.arange(first, last, dtype=torch.int32, device=compute_device(torch.device(device)))
        z = self._draw_tiles(direction, name, tiles, 1.0).view(-1)
        return z[start - first * self.tile :][: stop - start].to(device)

    @torch.no_grad()
    def perturb(self, direction: Direction, span: Span, c: float, *outs: Tensor) -> None:
        """Write theta + c z and, with two outputs, theta - c z: see `Noise.perturb`."""
        theta, device = span.theta, span.segment.device
        is_there = device == theta.device
        whole = (theta, *outs) if is_there else (theta.to(device), *(torch.empty_like(o, device=device) for o in outs))
        kernel = self._kernels.perturb if len(outs) == 1 else self._kernels.perturb_pair
        rest = (self._directions(direction.step, direction.sample, device), self._scaled_for_forwards(c, device))
        for chunk, part in span.split(call_size(self._per_call, device)):
            arrays = [_part(tensor, chunk) for tensor in whole]
            kernel(*arrays, part.tiles, part.keys(direction.seed), *rest)
        for out, computed in zip(() if is_there else outs, whole[1:], strict=False):
            out.copy_(computed)

    @torch.no_grad()
    def perturb_rows(
        self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float, *outs: Tensor
    ) -> None:
        """Write theta[rows] + c z[rows] and with minus, drawing z for these rows only: see `Noise.perturb_rows`."""
        width, device, tile = prod(theta.shape[1:]), compute_device(theta.device), self.tile
        aligned = width % tile == 0 or tile % width == 0
        tiles_per_row = max(1, width // tile) if aligned else (width + tile - 2) // tile + 1  # at most
        max_rows = max(1, call_size(self._per_call, device) // tile // tiles_per_row)
        for start in range(0, len(rows), max_rows):
            numbers = rows[start : start + max_rows]
            begin = numbers.to(device) * width
            first = begin // tile
            tiles = (first[:, None] + _numbers(tiles_per_row, device)).to(torch.int32)
            cz = self._draw_tiles(direction, name, tiles.view(-1), c).view(len(numbers), tiles_per_row * tile)
            if tiles_per_row * tile != width:
                cz = cz.gather(1, (begin - first * tile)[:, None] + _numbers(width, device))
            values = theta[numbers]
            cz = cz.reshape(values.shape).to(theta.device)
            for sign, out in zip((1, -1), outs, strict=False):
                out[start : start + max_rows] = torch.add(values, cz, alpha=sign)

    def begin_pass(self) -> None:
        """Free what was made for the terms before: see `Noise.begin_pass`."""
        self._directions.cache_clear()
        self._scaled.cache_clear()

    @torch.no_grad()
    def update_(
        self, span: Span, theta: Tensor, terms: Terms, decays: Sequence[float], decay_in_float64: bool = False
    ) -> None:
        """Apply theta <- decay theta + coefficient z for each term in order, in place: see `Noise.update_`.

        All terms are applied to one part of theta before the next, while it is in cache. theta may also be in half
        precision, with `decay_in_float64`: each term is then a step of its own, and its result is rounded as by
        `rounding.round_`, bitwise identical.
        """
        device, rounds = span.segment.device, theta.dtype != torch.float32
        computed = theta if device == theta.device else theta.to(device, copy=True)
        operations = [self._operation(decay, decay_in_float64, device) for decay in decays]
        for chunk, part in span.split(call_size(MAX_ELEMENTS if rounds else self._per_call, device)):
            block = _part(computed, chunk)
            for ((seed, step, sample), coefficient), (name, more) in zip(terms, operations, strict=True):
                drawn = part.tiles, part.keys(seed), self._directions(step, sample, device)
                scaled = self._scaled(coefficient, device)
                if rounds:
                    kernel = update_kernel(self._kernels, name)
                    kernel(block, *drawn, scaled, of_step(step, ROUND, device), *more)
                else:
                    getattr(self._kernels, name)(block, *drawn, scaled, *more)
        if computed is not theta:
            theta.copy_(computed)

    def _operation(self, decay: float, in_float64: bool, device: torch.device) -> tuple[str, tuple[Tensor, ...]]:
        """Return the name of the kernel that applies a decay, and its last input.

        It is `add` where nothing decays: a float32 sum is the same when it is taken in float64.
        """
        value = decay_number(decay, in_float64)
        if value is None:
            return "add", ()
        return "shrink" if in_float64 else "decay", (self._decays(value, device),)

    def _draw_tiles(self, direction: Direction, name: str, tiles: Tensor, c: float) -> Tensor:
        """Return c z for the tiles of these numbers (int32 [T], on the compute device), float32 [T, tile]."""
        count, device = len(tiles), tiles.device
        if count % 2:  # an even number, so that no call is left with a single tile (see `spans.MIN_TILES`)
            tiles = torch.cat([tiles, tiles[-1:]])
        cz = torch.zeros(len(tiles), self.tile, device=device)
        most = call_size(self._per_call, device) // self.tile
        keys = _same_keys(direction.seed, name, 1 << max(0, min(most, len(tiles)) - 1).bit_length(), device)
        rest = (self._directions(direction.step, direction.sample, device), self._scaled_for_forwards(c, device))
        for of_call, part in zip(tiles.split(most), cz.split(most), strict=True):
            self._kernels.add(part.view(-1), of_call, keys[: len(of_call)], *rest)
        return cz[:count]


def _part(tensor: Tensor, chunk: slice) -> Tensor:
    return tensor if chunk.start == 0 and chunk.stop == tensor.shape[0] else tensor[chunk]


# --- the kinds ---


def draw_gaussian(tiles: Tensor, keys: Tensor, step_sample: Tensor, table: Tensor) -> Tensor:
    """Draw c z: for each 16 bits of a word the entry of `table` (float32 [65536]), float32 [T, 4, 2, LANES]."""
    shifts = torch.arange(2, dtype=torch.int32, device=tiles.device).view(2, 1) * 16
    codes = (random_words(tiles, keys, step_sample) >> shifts) & 0xFFFF
    # not table[codes]: the compiled code of an embedding does not check for negative indices, and takes 0.6 of the time
    return torch.nn.functional.embedding(codes, table.view(-1, 1)).squeeze(-1)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def gaussian_table(device: Device = "cpu") -> Tensor:
    """Return the quantiles of N(0, 1) at (i + 1/2) / 65536, scaled to a variance of 1: float32 [65536].

    Entry 65535 - i is entry i with its sign flipped, so the mean is 0. The largest is 4.325. They are computed by
    Python's `NormalDist` (Wichura's AS 241, in float64) and rounded to float32.
    """
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse(0.5 + (i + 0.5) / CODES) for i in range(CODES // 2)])
    upper /= np.sqrt(np.mean(upper**2))
    return torch.from_numpy(np.concatenate([-upper[::-1], upper]).astype(np.float32)).to(device)


def scaled_table(c: float, device: torch.device) -> Tensor:
    """Return c times the table, float32 [65536]."""
    # Multiplied on the device: a copy of each scaled table would wait for it. A product is the same on every device.
    return gaussian_table(device) * to_float32(c)


def draw_rademacher(tiles: Tensor, keys: Tensor, step_sample: Tensor, c: Tensor) -> Tensor:
    """Draw c z: +c for a set bit, else -c (c: float32 []), float32 [T, 4, 32, LANES]."""
    shifts = torch.arange(32, dtype=torch.int32, device=tiles.device).view(32, 1)
    return torch.where((random_words(tiles, keys, step_sample) >> shifts) & 1 != 0, c, -c)


def coefficient(c: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return c, rounded to float32: []."""
    return torch.full((), to_float32(c), dtype=dtype, device=device)


GAUSSIAN = make_kernels(draw_gaussian, per_word=2, max_tiles=4096, native="gaussian")
RADEMACHER = make_kernels(draw_rademacher, per_word=32, max_tiles=1024, native="rademacher")
# Make a noise.
gaussian_noise = partial(CounterNoise, "gaussian", GAUSSIAN, scaled_table)  # z ~ N(0, I)
rademacher_noise = partial(CounterNoise, "rademacher", RADEMACHER, coefficient)  # 1 or -1, each with probability 1/2
