"""Tensors of which every rank of a process group holds an equal part, and which a module sees whole while it runs.

What FSDP2's `fully_shard` does for one device's memory, for forwards alone: a tensor's tiles are dealt out in order, so
rank r holds one range of its elements. It perturbs that range, with its own slice of z, into its part of the buffer
that the module will read; then the ranks exchange their parts. So the gathered tensor has the bits that one process
computes, no rank draws another rank's z, and theta itself is never sent. The update writes each rank's own part.

Of a table only the rows that a batch looks up are exchanged. Tensors of less than `WHOLE` elements stay whole on every
rank: to exchange them would take longer than to perturb them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.distributed.shard_group import ShardGroup
from mezo_cli.perturb.noise import Direction, Noise
from mezo_cli.perturb.noise.spans import MIN_TILES, Piece, Segment
from mezo_cli.system import private_file_mappings, release_mapped_pages, trim_malloc

WHOLE = 1 << 14  # elements below which a tensor is not sharded
CHUNK = 1 << 22  # elements that are sent at a time where a whole tensor is read in order


class Shard:
    """A tensor of the model, of which this rank holds one part.

    Args:
        name: the tensor's name in the model.
        p: the whole tensor. Its data become a placeholder: the same shape, no memory, and nan as every element, so
            that a forward which reads it past this class has no finite loss.
        tile: elements per tile of the noise.
        group: the ranks.
        device: where this rank's part is stored.
        dtype: in which it is stored.

    Attributes:
        name, shape: of the tensor.
        numel: elements of the whole tensor as it is gathered, with the padding behind it.
        local: this rank's part; its `theta` is the storage.
    """

    def __init__(
        self, name: str, p: nn.Parameter, tile: int, group: ShardGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.name, self.shape, self._group = name, tuple(p.shape), group
        width = math.prod(self.shape[1:])
        tiles = max(MIN_TILES, -(-p.numel() // (tile * group.size)))
        of_row = width // math.gcd(width, tile)  # a part of a multiple of it begins with a row
        self._has_rows = 8 * of_row <= tiles and len(self.shape) > 1  # else the padding would be much of it
        if self._has_rows:
            tiles = -(-tiles // of_row) * of_row
        self._part = tiles * tile
        self.numel = self._part * group.size
        start = group.rank * self._part
        own = p.data.reshape(-1)[start : start + self._part]
        flat = torch.zeros(self._part, dtype=dtype, device=device)
        flat[: len(own)] = own
        self.local = Segment(flat, [(name, self.shape)], tile, shard_start=group.rank * tiles).whole
        self._first_row = start // width if self._has_rows else 0
        p.data = torch.full((), math.nan, dtype=dtype, device=device).expand(self.shape)

    @property
    def device(self) -> torch.device:
        """Where this rank's part is stored."""
        return self.local.theta.device

    @cached_property
    def pieces(self) -> list[Piece]:
        """Where the tensor is in what `perturb` and `copy` write: as `Span.pieces`."""
        return [Piece(self.name, self.shape, 0, math.prod(self.shape), 0)]

    @cached_property
    def _table(self) -> Tensor:
        """This rank's rows."""
        return self.local.theta.view(-1, *self.shape[1:])

    def perturb(self, noise: Noise, direction: Direction, c: float, *outs: Tensor) -> None:
        """Write theta + c z and, to a second output, theta - c z of the whole tensor: see `Noise.perturb`.

        Args:
            noise: draws this rank's slice of z.
            direction: names z.
            c: the coefficient.
            outs: [numel] each.
        """
        self._gather(outs, lambda own: noise.perturb(direction, self.local, c, *own), "step")

    def copy(self, out: Tensor) -> None:
        """Write the whole of theta to `out`, [numel], in its dtype."""
        self._gather([out], lambda own: own[0].copy_(self.local.theta), "evaluation")

    def _gather(self, outs: Sequence[Tensor], write: Callable[[list[Tensor]], Any], purpose: str) -> None:
        start = self._group.rank * self._part
        write([out[start : start + self._part] for out in outs])
        for out in outs:
            self._group.gather_(out, purpose)

    def perturb_rows(self, noise: Noise, direction: Direction, rows: Tensor, c: float, outs: Tensor) -> None:
        """Write rows of what `perturb` writes.

        Args:
            noise, direction, c: as for `perturb`.
            rows: their numbers, int64 [R]; the same on all ranks.
            outs: [signs, R, ...], contiguous.
        """
        if not self._has_rows:
            whole = torch.empty(len(outs), self.numel, dtype=outs.dtype, device=outs.device)
            self.perturb(noise, direction, c, *whole)
            outs.copy_(self._view(whole)[:, rows])
            return
        first = self._first_row
        own = rows.clamp(first, first + len(self._table) - 1)
        of_signs = outs.unbind()
        if len(of_signs) == 1:
            noise.perturb_rows(direction, self.name, self._table, own, c, of_signs[0], first_row=first)
        else:
            noise.perturb_rows(direction, self.name, self._table, own, c, of_signs[0], of_signs[1], first_row=first)
        self._exchange_rows(rows, outs, "step")

    def read(self, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return theta, or some of its rows, in a dtype.

        Args:
            rows: their numbers, int64 [R]; the same on all ranks. None: the whole tensor.
            dtype: the dtype.
        """
        if rows is None or not self._has_rows:
            whole = torch.empty(self.numel, dtype=dtype, device=self.device)
            self.copy(whole)
            found = self._view(whole)
            return found if rows is None else found[rows]
        own = (rows - self._first_row).clamp(0, len(self._table) - 1)
        found = self._table[own].to(dtype)
        self._exchange_rows(rows, found.unsqueeze(0), "evaluation")
        return found

    def _view(self, whole: Tensor) -> Tensor:
        """Return the tensor in [..., numel] gathered elements, without the padding."""
        return whole[..., : math.prod(self.shape)].unflatten(-1, self.shape)

    def _exchange_rows(self, rows: Tensor, found: Tensor, purpose: str) -> None:
        """Put the rows that other ranks hold in their places: [signs, R, ...].

        A rank sets the rows that it does not hold to zero bits, and the sum of integers is the bits of the one rank
        that has them: a sum of floats would change -0.0. No size depends on the rows, so the host need not wait.
        """
        inside = (rows >= self._first_row) & (rows < self._first_row + len(self._table))
        found.masked_fill_(~inside.view(1, -1, *[1] * (found.dim() - 2)), 0)
        bits = found.view(-1)
        if bits.nbytes % 4:  # one row of an odd number of two-byte elements
            bits = torch.nn.functional.pad(bits, (0, 1))
        self._group.sum_(bits.view(torch.int32), purpose)
        if bits.numel() != found.numel():
            found.view(-1).copy_(bits[:-1])

    def chunks(self) -> Iterator[Tensor]:
        """Yield the tensor's elements in order, on the CPU, on every rank; never more than `CHUNK` at a time."""
        left = math.prod(self.shape)
        for source in range(self._group.size):
            for start in range(0, self._part, CHUNK):
                size = min(CHUNK, self._part - start, left)
                if not size:
                    return
                part = self.local.theta[start : start + size]
                values = part.clone() if source == self._group.rank else torch.empty_like(part)
                self._group.broadcast_(values, source)
                yield values.cpu()
                left -= size


def shard_parameters(
    model: nn.Module,
    tile: int,
    group: ShardGroup,
    device: torch.device,
    dtype: torch.dtype,
    whole: Collection[str] = (),
) -> dict[str, Shard]:
    """Keep this rank's part of each large parameter, and free the rest; tied parameters are one.

    The model is moved to the device, and its parameters get the dtype.

    Args:
        model: its parameters are on the CPU; those that a mapped file backs are read only where this rank needs them.
        tile: elements per tile of the noise.
        group: the ranks.
        device: where the weights are stored.
        dtype: in which they are stored.
        whole: names of parameters that stay whole.

    Returns:
        name -> shard. The other parameters are whole.
    """
    shards, mappings = {}, private_file_mappings()
    for name, p in model.named_parameters():
        if name in whole or p.numel() < max(WHOLE, group.size * MIN_TILES * tile):
            p.data = p.data.to(device, dtype)
            continue
        old = p.data
        shards[name] = Shard(name, p, tile, group, device, dtype)
        if old.device.type == "cpu" and old.is_contiguous():
            release_mapped_pages(old.data_ptr(), old.nbytes, mappings)
        del old
        trim_malloc()
    model.to(device)  # the buffers
    return shards


@contextmanager
def gathered_modules(model: nn.Module, shards: Mapping[str, Shard]) -> Iterator[None]:
    """Let the model's own forwards inside see whole tensors: those of a module are gathered while it runs."""
    shard_of = {id(model.get_parameter(name)): shard for name, shard in shards.items()}
    before: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def gather(module: nn.Module, args: Any) -> None:
        own = [p for p in module._parameters.values() if p is not None and id(p) in shard_of]
        before[module] = [(p, p.data) for p in own]
        for p in own:
            p.data = shard_of[id(p)].read(None, p.dtype)

    def release(module: nn.Module, args: Any, output: Any) -> None:
        for p, placeholder in before.pop(module, []):
            p.data = placeholder

    handles: list[Any] = []
    try:
        for module in model.modules():
            if any(id(p) in shard_of for p in module._parameters.values() if p is not None):
                handles.append(module.register_forward_pre_hook(gather))
                handles.append(module.register_forward_hook(release, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        trim_malloc()  # glibc keeps the freed tensors, which have other sizes than those of the steps
