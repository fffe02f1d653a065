"""Gaussian and Rademacher directions from the counter-based generator."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from statistics import NormalDist

import numpy as np
import torch
from torch import LongTensor, Tensor

from mezo_cli.noise.direction import Direction
from mezo_cli.noise.kernels import (
    GAUSSIAN_TILE,
    RADEMACHER_TILE,
    Kernel,
    gaussian_shift,
    gaussian_update,
    rademacher_shift,
    rademacher_update,
)
from mezo_cli.noise.philox import stream_key

CHUNK = 1 << 20  # elements a call of a kernel works on: its words stay in cache
CODES = 1 << 16  # entries of the gaussian table
SCALED = 64  # scaled tables kept (16 MB): as many terms a replay applies to a chunk


@lru_cache(maxsize=1)
def gaussian_table() -> Tensor:
    """float32 [65536]: the quantiles of N(0, 1) at (i + 1/2) / 65536, scaled so that their variance is 1.

    Entry 65535 - i is entry i with its sign flipped, so the mean is 0. Largest value 4.33. From Python's own
    `NormalDist`, whose algorithm (Wichura's AS241) needs only + - * /, sqrt and log, in float64, rounded to float32.
    """
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse(0.5 + (i + 0.5) / CODES) for i in range(CODES // 2)])
    upper /= np.sqrt(np.mean(upper**2))
    return torch.from_numpy(np.concatenate([-upper[::-1], upper]).astype(np.float32))


@lru_cache(maxsize=1024)
def _tile_ids(device: torch.device, count: int) -> Tensor:
    return torch.arange(count, device=device)


class CounterNoise:
    """z by (seed, step, sample, tensor name, element index), the same bits on every device.

    Args:
        kind: "gaussian" (quantile table by 16 generator bits) or "rademacher" (+1 or -1 by one bit).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.gaussian = kind == "gaussian"
        self.tile = GAUSSIAN_TILE if self.gaussian else RADEMACHER_TILE
        self._shift = Kernel(gaussian_shift if self.gaussian else rademacher_shift)
        self._update = Kernel(gaussian_update if self.gaussian else rademacher_update)
        self._scaled: OrderedDict[tuple[float, torch.device], Tensor] = OrderedDict()

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
        first, last = start // self.tile, -(-stop // self.tile)
        home = _home(torch.device(device))
        tiles = torch.arange(first, last, device=home)
        return self._steps(at, name, tiles, 1.0).view(-1)[start - first * self.tile :][: stop - start].to(device)

    @torch.no_grad()
    def shift(self, at: Direction, name: str, theta: Tensor, c: float, out: Tensor) -> None:
        """out = theta + c z, where c z is rounded to float32, the sum to float32, and that to out.dtype.

        Args:
            at: the direction.
            name: the tensor's name in the model.
            theta: float32, contiguous, any shape.
            c: the coefficient (rounded to float32).
            out: float32 or bfloat16, contiguous, as many elements; may not overlap theta.
        """
        source, target = _flat(theta), _flat(out)
        if _home(theta.device) != theta.device:
            moved = torch.empty_like(target, device=_home(theta.device))
            self.shift(at, name, source.to(moved.device), c, moved)
            target.copy_(moved)
            return
        scale, n = self._scale(c, theta.device), source.numel()
        for begin, end, padded in self._chunks(n):
            counter, tiles = self._counter(at, name, begin, theta.device), _tile_ids(theta.device, padded // self.tile)
            if padded == end - begin:
                self._shift(source[begin:end], target[begin:end], counter, tiles, scale)
            else:
                whole = source.new_zeros(padded)
                whole[: end - begin] = source[begin:end]
                result = torch.empty_like(whole, dtype=out.dtype)
                self._shift(whole, result, counter, tiles, scale)
                target[begin:end] = result[: end - begin]

    @torch.no_grad()
    def shift_rows(self, at: Direction, name: str, theta: Tensor, rows: LongTensor, c: float, out: Tensor) -> None:
        """out[i] = theta[rows[i]] + c z[rows[i]]: the rows of `shift`'s result, without the rest of the table.

        Args:
            at: the direction.
            name: the tensor's name in the model.
            theta: float32 [V, H], contiguous.
            rows: int64 [R], each in [0, V).
            c: the coefficient (rounded to float32).
            out: float32 or bfloat16 [R, H].
        """
        width, device = theta.shape[1], theta.device
        home = _home(device)
        covering = width // self.tile if width % self.tile == 0 else (width + self.tile - 2) // self.tile + 1
        at_once = max(1, CHUNK // (covering * self.tile))
        inside = torch.arange(width, device=home)
        for some, part in zip(rows.split(at_once), out.split(at_once), strict=True):
            begin = some.to(home) * width
            first = begin // self.tile
            tiles = (first[:, None] + torch.arange(covering, device=home)).view(-1)
            steps = self._steps(at, name, tiles, c).view(len(some), covering * self.tile)
            if covering * self.tile != width:
                steps = steps.gather(1, (begin - first * self.tile)[:, None] + inside)
            part.copy_(theta[some] + steps.to(device))

    @torch.no_grad()
    def update_(
        self, name: str, theta: Tensor, terms: Sequence[tuple[Direction, float]], decays: Sequence[float]
    ) -> None:
        """theta <- decay * theta + coeff * z for each term in order, chunk by chunk: as one call a term, bit for bit.

        coeff and decay are rounded to float32, coeff * z too, and the result once, from the exact sum's float64.

        Args:
            name: the tensor's name in the model.
            theta: float32, contiguous, any shape; changed in place.
            terms: (direction, coeff), in order.
            decays: one a term.
        """
        flat = _flat(theta)
        home = _home(theta.device)
        if home != theta.device:
            moved = flat.to(home)
            self.update_(name, moved, terms, decays)
            flat.copy_(moved)
            return
        keep = [torch.tensor(np.float32(d).item(), dtype=torch.float64, device=home) for d in decays]
        for begin, end, padded in self._chunks(flat.numel()):
            part = flat[begin:end]
            if padded != end - begin:
                part = flat.new_zeros(padded)
                part[: end - begin] = flat[begin:end]
            for (at, coeff), decay in zip(terms, keep, strict=True):
                counter, tiles = self._counter(at, name, begin, home), _tile_ids(home, padded // self.tile)
                self._update(part, decay, counter, tiles, self._scale(coeff, home))
            if padded != end - begin:
                flat[begin:end] = part[: end - begin]

    def _steps(self, at: Direction, name: str, tiles: Tensor, c: float) -> Tensor:
        """float32 [T, tile]: c z of the given tiles."""
        count, home = len(tiles), tiles.device
        if count % 2:  # an even number, so that no call is left with one tile (see `_chunks`)
            tiles = torch.cat([tiles, tiles[-1:]])
        steps = torch.zeros(len(tiles) * self.tile, device=home)
        decay = torch.ones((), dtype=torch.float64, device=home)
        counter, scale = self._counter(at, name, 0, home), self._scale(c, home)
        for some, part in zip(tiles.split(CHUNK // self.tile), steps.split(CHUNK), strict=True):
            self._update(part, decay, counter, some, scale)
        return steps.view(-1, self.tile)[:count]

    def _chunks(self, n: int) -> Iterator[tuple[int, int, int]]:
        """Cut [0, n): (begin, end, length to work on), whole tiles and two at least.

        Two, because a kernel compiled for any number of tiles is compiled again for exactly one.
        """
        for begin in range(0, n, CHUNK):
            end = min(n, begin + CHUNK)
            yield begin, end, max(2, -(-(end - begin) // self.tile)) * self.tile

    def _counter(self, at: Direction, name: str, begin: int, home: torch.device) -> Tensor:
        key0, key1 = stream_key(at.seed, name)
        return torch.tensor([key0, key1, at.step, at.sample, begin // self.tile], device=home)

    def _scale(self, c: float, home: torch.device) -> Tensor:
        """What a kernel adds: c z for each code of 16 bits (float32 [65536]), or +c (float32 [])."""
        if not self.gaussian:
            return torch.tensor(c, dtype=torch.float32, device=home)
        key = (c, home)
        if key not in self._scaled:
            if len(self._scaled) >= SCALED:
                self._scaled.popitem(last=False)
            self._scaled[key] = (gaussian_table() * torch.tensor(c, dtype=torch.float32)).to(home)
        self._scaled.move_to_end(key)
        return self._scaled[key]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)  # view, not reshape: a copy would swallow what is written


def _home(device: torch.device) -> torch.device:
    """Where a device's noise is computed: MPS has no float64, so its tensors take the way over the CPU."""
    return torch.device("cpu") if device.type == "mps" else device
