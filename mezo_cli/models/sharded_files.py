"""Write a model whose ranks hold parts of its tensors to one safetensors file, tensor by tensor, from rank 0."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


class ShardedTensor(Protocol):
    """A tensor of which every rank holds a part: `perturb.shards.Shard`."""

    def chunks(self) -> Iterator[Tensor]:
        """Yield the tensor's elements in order, on every rank; a bounded number at a time."""


NOT_SHARDED: Mapping[str, ShardedTensor] = MappingProxyType({})


def write_weights(model: Any, shards: Mapping[str, ShardedTensor], path: Path | None) -> None:
    """Write parameters and persistent buffers by their names in the model, tied ones once. All ranks call it together.

    transformers ties and loads them from such a file as from its own. No rank holds a whole tensor.

    Args:
        model: has the tensors; those in `shards` are placeholders.
        shards: name -> shard.
        path: of the file; None on the ranks that do not write.
    """
    tensors = dict(model.named_parameters())
    known = {id(p) for p in model.parameters()}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in known:
            tensors[name] = value
    shard_of = {id(tensors[name]): shard for name, shard in shards.items()}
    tensors = {_stored_name(model, name): value for name, value in tensors.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))  # as safetensors does
    if path is None:
        for value in tensors.values():
            for _ in shard_of[id(value)].chunks() if id(value) in shard_of else ():
                pass  # another rank writes what this one has sent
        return
    with open(path, "wb") as file:
        file.write(_header(tensors))
        for value in tensors.values():
            whole, shard = value.detach(), shard_of.get(id(value))
            for part in [whole.cpu().contiguous().view(-1)] if shard is None else shard.chunks():
                file.write(part.view(torch.uint8).numpy().data)


def _stored_name(model: Any, name: str) -> str:
    """Return the name by which transformers stores a tensor: of tied ones that of the source, not the model's first."""
    source = getattr(model, "all_tied_weights_keys", {}).get(name, name)
    same = source != name and model.get_parameter(source) is model.get_parameter(name)
    return source if same else name


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return what is before the data: their length, and JSON with dtype, shape and place of each tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, value in tensors.items():
        end = begin + value.numel() * value.dtype.itemsize
        entries[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
