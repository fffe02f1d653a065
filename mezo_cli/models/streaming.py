"""Read the numbered layers of a frozen base from its mapped files as they run, and give their memory back.

The weights of a layer are tensors of a mapped safetensors file: they are in memory from when they are read until the
system needs the memory. A step reads all of them in the same order, so a system that evicts the oldest would read
everything again. So each layer's pages are given back when it has run, in the process and in the system's cache, and
those of the layer that comes next are asked for meanwhile.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.models.quantized import QuantizedLinear
from mezo_cli.perturb.functional import swapped
from mezo_cli.process.memory import give_pages_back, mapped_files, trim_malloc

CHUNK = 1 << 24  # bytes of a file that are hashed at a time


class Extent(NamedTuple):
    """A part of a mapped file."""

    address: int  # in this process
    file: int  # descriptor
    offset: int  # in the file
    size: int


class StreamedLayers:
    """The numbered layers of a model whose files are mapped, and where in the files their weights are.

    Args:
        model: as it was loaded: no tensor of its layers has been copied or converted.
        files: its safetensors files.
        memory: the most bytes of the first layers that stay in memory.
        name: of the model, for error lines.

    Attributes:
        layers: the numbered layers.
        sizes: the bytes of each layer.
        sha256: over the contents of the files.
        bytes_read: of the layers that have been read since the model was loaded, those that stay included.
    """

    def __init__(self, model: Any, files: list[Path], memory: int, name: str) -> None:
        self.memory = memory
        self.layers = numbered_layers(model)[2]
        self._files = {os.path.realpath(file): file.open("rb", buffering=0) for file in files}
        opened = {path: file.fileno() for path, file in self._files.items()}
        tensors, mapped = list[list[Tensor]](), mapped_files()
        for layer in self.layers:  # of a quantised module its bits and scales are read
            quantized = [module for module in layer.modules() if isinstance(module, QuantizedLinear)]
            parts = [part for module in quantized for part in (module.bits, module.scale)]
            tensors.append(parts or list(layer.parameters()))
        self._extents = [_extents(of_layer, mapped, opened) for of_layer in tensors]
        self.sizes = [sum(extent.size for extent in extents) for extents in self._extents]
        self._addresses = {id(tensor): tensor.data_ptr() for of_layer in tensors for tensor in of_layer}
        if self.sizes != [sum(tensor.nbytes for tensor in of_layer) for of_layer in tensors]:
            why = "the tensors of its layers are not all of one dtype, or lie in no mapped safetensors file"
            raise UserError(f"{name}: model.stream=true reads layers from their file, and {why}")
        self._kept = sum(sum(self.sizes[: count + 1]) <= memory for count in range(len(self.sizes)))
        self._reader = ThreadPoolExecutor(1, "mezo-read-ahead")
        self._held, self.bytes_read = False, 0
        total, buffer = hashlib.sha256(), bytearray(CHUNK)
        for descriptor in opened.values():  # read once, and not kept in memory
            offset = 0
            while size := os.preadv(descriptor, [buffer], offset):
                total.update(memoryview(buffer)[:size])
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
                offset += size
        self.sha256 = total.hexdigest()
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._begin(number))
            layer.register_forward_hook(lambda *_, number=number: self._end(number))

    def has(self, p: Tensor) -> bool:
        """Return whether a parameter is read from its file: one that is trained has been moved."""
        return self._addresses.get(id(p)) == p.data_ptr()

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Keep a layer in memory inside the block, however often it runs, and give its memory back at the end."""
        self._begin(number)
        with self.unread():
            yield
        self._end(number)

    def unread(self) -> AbstractContextManager[None]:
        """Let layers run inside the block without being read or given back."""
        return swapped("_held", {self: True})

    def _begin(self, number: int) -> None:
        """Ask for the layer after this one; the last one is followed by the first that does not stay in memory."""
        if self._held:
            return
        following = number + 1 if number + 1 < len(self.layers) else self._kept
        if self._kept <= following < len(self.layers):
            self._reader.submit(_advise, self._extents[following], os.POSIX_FADV_WILLNEED)
        self.bytes_read += self.sizes[number]

    def _end(self, number: int) -> None:
        if self._held or number < self._kept:
            return
        for address, _, _, size in self._extents[number]:
            give_pages_back(address, size)
        _advise(self._extents[number], os.POSIX_FADV_DONTNEED)
        trim_malloc()  # what a layer of 7B leaves in pieces would add up to 0.3 GB


def numbered_layers(model: Any) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return the list of the numbered layers, with the module that has it and its name there."""
    return next(
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
    )


def streamed_layers(model: Any) -> StreamedLayers | None:
    """Return what reads the layers of a model; None where they stay in memory."""
    return cast("StreamedLayers | None", getattr(model, "mezo_stream", None))


def _extents(tensors: list[Tensor], files: list[tuple[int, int, int, str]], opened: dict[str, int]) -> list[Extent]:
    """Return where tensors lie, adjacent ones together; those that lie in none of the mapped files are left out."""
    extents: list[Extent] = []
    for address, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        for low, high, begin, path in files:
            if path in opened and low <= address and address + size <= high:
                offset = address - low + begin
                last = extents[-1] if extents else Extent(0, -1, 0, 0)
                if last.file == opened[path] and last.offset + last.size == offset:
                    extents[-1] = last._replace(size=last.size + size)
                else:
                    extents.append(Extent(address, opened[path], offset, size))
    return extents


def _advise(extents: list[Extent], advice: int) -> None:
    for _, file, offset, size in extents:
        os.posix_fadvise(file, offset, size, advice)
