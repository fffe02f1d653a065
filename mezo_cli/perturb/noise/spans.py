"""Flat storage: tensors side by side in tiles of the noise, so that one kernel goes over many of them.

Every tensor begins at a tile of its own. What a kernel needs to draw z is stored per tile: the number of the tile in
its tensor, and the key of the tensor. So one call covers any neighbouring tiles, of however many tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

# Of every tensor, and of every call: what a compiler makes for any number of tiles may not be for exactly one.
MIN_TILES = 2


def tiles_of(numel: int, tile: int) -> int:
    """Return how many tiles a tensor takes in flat storage."""
    return max(MIN_TILES, -(-numel // tile))


class Piece(NamedTuple):
    """Neighbouring elements of one tensor, and where they are in a span."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # the first of the elements, in the tensor
    numel: int  # without the padding behind the tensor
    offset: int  # of the first element in the span


class Segment:
    """One block of flat storage, with the tensors in it.

    Args:
        flat: the storage, [tiles * tile]; what is behind a tensor in its last tile is never read.
        tensors: (name, shape), in order.
        tile: elements per tile.

    Attributes:
        device: where kernels run.
        ends: where each tensor ends, in tiles.
    """

    def __init__(self, flat: Tensor, tensors: Sequence[tuple[str, tuple[int, ...]]], tile: int) -> None:
        self.flat, self.tensors, self.tile, self.device = flat, tensors, tile, compute_device(flat.device)
        self._counts = np.array([tiles_of(int(np.prod(shape)), tile) for _, shape in tensors])
        self.ends = self._counts.cumsum()
        self._keys: tuple[int, Tensor] | None = None  # of one seed: a run has one

    @cached_property
    def whole(self) -> Span:
        """All of it."""
        return Span(self, 0, int(self.ends[-1]))

    @cached_property
    def numbers(self) -> Tensor:
        """The number of each tile in its tensor, int32 [T]."""
        numbers = np.arange(self.ends[-1]) - np.repeat(self.ends - self._counts, self._counts)
        with torch.inference_mode(False):
            return torch.from_numpy(numbers.astype(np.int32)).to(self.device)

    def keys(self, seed: int) -> Tensor:
        """Return `packed_key` of each tile's tensor, int64 [T]."""
        if self._keys is None or self._keys[0] != seed:
            keys = np.repeat(np.array([packed_key(seed, name) for name, _ in self.tensors]), self._counts)
            with torch.inference_mode(False):
                self._keys = seed, torch.from_numpy(keys).to(self.device)
        return self._keys[1]


class Span:
    """Neighbouring tiles of a segment.

    Args:
        segment: the segment.
        first, last: the tiles [first, last), at least two.
    """

    def __init__(self, segment: Segment, first: int, last: int) -> None:
        self.segment, self.first, self.last = segment, first, last
        self.tile, self.numel = segment.tile, (last - first) * segment.tile  # numel counts the padding
        self._parts: dict[int, list[tuple[slice, Span]]] = {}

    def slice_of(self, flat: Tensor) -> Tensor:
        """Return the span's part of a tensor with the layout of the segment."""
        return flat[self.first * self.tile : self.last * self.tile]

    @cached_property
    def theta(self) -> Tensor:
        """The span's part of the storage."""
        return self.slice_of(self.segment.flat)

    @cached_property
    def tiles(self) -> Tensor:
        """The number of each tile in its tensor, int32 [T]."""
        return self.segment.numbers[self.first : self.last]

    def keys(self, seed: int) -> Tensor:
        """Return `packed_key` of each tile's tensor, int64 [T]."""
        return self.segment.keys(seed)[self.first : self.last]

    @cached_property
    def pieces(self) -> list[Piece]:
        """The tensors, or parts of them, that the span covers."""
        pieces, begin = [], 0
        for (name, shape), end in zip(self.segment.tensors, self.segment.ends.tolist(), strict=True):
            first = max(begin, self.first)
            if first < min(end, self.last):
                start, numel = (first - begin) * self.tile, int(np.prod(shape))
                length = min(numel, (min(end, self.last) - begin) * self.tile) - start
                pieces.append(Piece(name, shape, start, max(0, length), (first - self.first) * self.tile))
            begin = end
        return pieces

    def split(self, size: int) -> list[tuple[slice, Span]]:
        """Cut the span into parts of about `size` elements: (place in the span, part). A part has two tiles or more."""
        if size not in self._parts:
            tiles = max(MIN_TILES, size // self.tile)
            ends = [*range(self.first, self.last - MIN_TILES + 1, tiles), self.last]
            self._parts[size] = [
                (slice((a - self.first) * self.tile, (b - self.first) * self.tile), Span(self.segment, a, b))
                for a, b in pairwise(ends)
            ]
        return self._parts[size]


def compute_device(device: torch.device) -> torch.device:
    """Return the device on which noise for `device` is computed: MPS has no float64, so its noise is on the CPU."""
    return torch.device("cpu") if device.type == "mps" else device


@lru_cache(maxsize=8192)
def stream_key(seed: int, name: str) -> tuple[int, int]:
    """Return the 64-bit key of one tensor's stream under one seed, as two 32-bit words."""
    digest = blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def packed_key(seed: int, name: str) -> int:
    """Return the key of a tensor's stream as one int64: its first word in the low half."""
    low, high = stream_key(seed, name)
    return int(np.array(low | high << 32, dtype=np.uint64).view(np.int64))
