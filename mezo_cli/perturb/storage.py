"""Move the trainable tensors of a model into flat storage, of which they are views from then on."""

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor, nn

from mezo_cli.perturb.noise.spans import Segment, tiles_of
from mezo_cli.system import mapped_files, release_mapped_pages, trim_malloc

# Elements of a segment (128 MB in float32). A launch over one takes far longer than to start it. While a segment is
# filled its tensors exist twice on a GPU, so it is a small part of a large model.
SEGMENT = 1 << 25
TRIM_BYTES = 1 << 24  # on a CPU freed memory is returned to the system after as much has been moved


def move_to_flat_storage(tensors: Mapping[str, nn.Parameter], tile: int) -> list[Segment]:
    """Make the tensors views of flat storage, in their order; their values stay.

    The tensors of one module are in one segment, so that one call perturbs all of them. A large tensor that fills whole
    tiles stays where it is. Others are moved one by one, and their old memory is freed.

    Args:
        tensors: name -> parameter.
        tile: elements per tile.
    """
    return [_fill({name: tensors[name] for name in names}, tile) for names in _share_out(tensors, tile)]


def _share_out(tensors: Mapping[str, nn.Parameter], tile: int) -> Iterator[list[str]]:
    """Yield the names of each segment's tensors."""
    names: list[str] = []
    taken, last_kind = 0, None
    for (_, *kind), group in groupby(tensors, lambda n: (n.rpartition(".")[0], tensors[n].dtype, tensors[n].device)):
        rest = []
        for name in group:
            if _stays(tensors[name], tile):
                yield [name]
            else:
                rest.append(name)
        size = sum(tiles_of(tensors[name].numel(), tile) * tile for name in rest)
        if names and (taken + size > SEGMENT or kind != last_kind):
            yield names
            names, taken = [], 0
        names, taken, last_kind = names + rest, taken + size, kind
    if names:
        yield names


def _stays(p: Tensor, tile: int) -> bool:
    """Return whether a tensor is a segment of its own, where it is: to copy it would take much memory for a moment."""
    return 2 * p.numel() >= SEGMENT and p.numel() % tile == 0 and p.is_contiguous()


def _fill(tensors: Mapping[str, nn.Parameter], tile: int) -> Segment:
    """Return a segment of these tensors."""
    shapes = [(name, tuple(p.shape)) for name, p in tensors.items()]
    first = next(iter(tensors.values())).data
    if len(tensors) == 1 and _stays(first, tile):
        return Segment(first.view(-1), shapes, tile)
    total = sum(tiles_of(p.numel(), tile) for p in tensors.values()) * tile
    flat, begin = torch.empty(total, dtype=first.dtype, device=first.device), 0
    mapped = mapped_files() if first.device.type == "cpu" else []
    untrimmed = 0  # bytes of old memory that malloc may still hold
    for p in tensors.values():
        end = begin + tiles_of(p.numel(), tile) * tile
        view = flat[begin : begin + p.numel()].view(p.shape)
        old = p.data
        view.copy_(old)
        flat[begin + p.numel() : end].zero_()
        # As a storage of its own, where torch can: `save_pretrained` copies all tensors that are parts of one storage,
        # which would take the memory of a second model.
        p.data = torch.from_dlpack(view) if view.device.type in ("cpu", "cuda") else view
        if mapped and old.is_contiguous():
            release_mapped_pages(old.data_ptr(), old.nbytes, mapped)
        del old
        begin = end
        untrimmed += view.nbytes
        if first.device.type == "cpu" and untrimmed >= TRIM_BYTES:
            trim_malloc()
            untrimmed = 0
    return Segment(flat, shapes, tile)
