"""Flat storage: tensors side by side in tiles of the noise, so that one kernel goes over many of them.

Every tensor begins at a tile of its own; the trainable ones are views of the storage. What a kernel needs to draw z is
stored per tile: the number of the tile in its tensor, and the key of the tensor. So one call covers any neighbouring
tiles, of however many tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mezo_cli.process.memory import mapped_files, release_file_pages, trim_malloc

# Of every tensor, and of every call: what a compiler makes for any number of tiles may not be for exactly one.
MIN_TILES = 2
# Elements of a segment (128 MB in float32). A launch over one takes far longer than to start it. While a segment is
# filled its tensors exist twice on a GPU, so it is a small part of a large model.
SEGMENT = 1 << 25
TRIM_BYTES = 1 << 24  # on a CPU freed memory is returned to the system after as much has been moved


def tiles_of(numel: int, tile: int) -> int:
    """Return how many tiles a tensor takes in flat storage."""
    return max(MIN_TILES, -(-numel // tile))


class Piece(NamedTuple):
    """Neighbouring elements of one tensor, and where they are in a span."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # the first of the elements, in the tensor
    numel: int  # without the padding behind the tensor
    part: slice = slice(0)  # of the span


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

    Attributes:
        place: its elements in a tensor with the layout of the segment.
    """

    def __init__(self, segment: Segment, first: int, last: int) -> None:
        self.segment, self.first, self.last = segment, first, last
        self.tile, self.numel = segment.tile, (last - first) * segment.tile  # numel counts the padding
        self.place = slice(first * self.tile, last * self.tile)
        self._parts: dict[int, list[tuple[slice, Span]]] = {}

    @cached_property
    def theta(self) -> Tensor:
        """The span's part of the storage."""
        return self.segment.flat[self.place]

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
                length = max(0, min(numel, (min(end, self.last) - begin) * self.tile) - start)
                offset = (first - self.first) * self.tile
                pieces.append(Piece(name, shape, start, length, slice(offset, offset + length)))
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


def to_flat_storage(tensors: Mapping[str, nn.Parameter], tile: int) -> Iterator[Segment]:
    """Move tensors to flat storage, segment by segment: a layer that fits is in one, which one call perturbs."""
    names: list[str] = []
    taken, last_kind, sizes = 0, None, Counter[str]()
    numbered = {name: re.match(r"(.*?\.)?\d+(?=\.)", name) for name in tensors}
    layers = {name: found[0] if found else "" for name, found in numbered.items()}  # as `model.layers.3`; "" for none
    for name, p in tensors.items():
        sizes[layers[name]] += p.numel()
    kinds = {}
    for name, p in tensors.items():
        in_layer = layers[name] and sizes[layers[name]] <= SEGMENT
        kinds[name] = layers[name] if in_layer else name.rpartition(".")[0], p.dtype, p.device
    for (_, *kind), group in groupby(tensors, kinds.__getitem__):
        rest = []
        for name in group:
            p = tensors[name]
            if 2 * p.numel() >= SEGMENT and p.numel() % tile == 0 and p.is_contiguous():
                # It stays where it is: to copy it would take much memory for a moment.
                yield Segment(p.data.view(-1), [(name, tuple(p.shape))], tile)
            else:
                rest.append(name)
        size = sum(tiles_of(tensors[name].numel(), tile) * tile for name in rest)
        if names and (taken + size > SEGMENT or kind != last_kind):
            yield _filled({name: tensors[name] for name in names}, tile)
            names, taken = [], 0
        names, taken, last_kind = names + rest, taken + size, kind
    if names:
        yield _filled({name: tensors[name] for name in names}, tile)


def _filled(tensors: Mapping[str, nn.Parameter], tile: int) -> Segment:
    """Return a segment that the tensors are views of: moved one by one, so that their old memory is freed."""
    first = next(iter(tensors.values())).data
    total = sum(tiles_of(p.numel(), tile) for p in tensors.values()) * tile
    flat, begin = torch.empty(total, dtype=first.dtype, device=first.device), 0
    mapped = mapped_files() if first.device.type == "cpu" else []
    untrimmed = 0  # bytes of old memory that malloc may still hold
    for p in tensors.values():
        end = begin + tiles_of(p.numel(), tile) * tile
        view, old = flat[begin : begin + p.numel()].view(p.shape), p.data
        view.copy_(old)
        flat[begin + p.numel() : end].zero_()
        # As a storage of its own, where torch can: `save_pretrained` copies all tensors that are parts of one storage,
        # which would take the memory of a second model.
        p.data = torch.from_dlpack(view) if view.device.type in ("cpu", "cuda") else view
        release_file_pages(old, mapped)
        del old
        begin, untrimmed = end, untrimmed + view.nbytes
        if first.device.type == "cpu" and untrimmed >= TRIM_BYTES:
            trim_malloc()
            untrimmed = 0
    return Segment(flat, [(name, tuple(p.shape)) for name, p in tensors.items()], tile)


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
