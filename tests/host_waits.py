"""Count where the host waits for a device, and what it copies to it, by the line of the code that does it."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
# Operations whose result's size depends on values, and those that return a value to Python: the host waits for each.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
Place = tuple[int, int, tuple[int, ...]]
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
MOVING = INDEXING | {"aten::where"}  # these copy an argument that is on the CPU to the device, and wait for the copy


class HostWaits(TorchDispatchMode):
    """Inside, `waits` and `copies` grow by one line of text per wait for the device and per copy to it.

    Args:
        read: stands in for reading values, (shape) -> nested lists of floats, on a device that has none. None: read.

    Attributes:
        shapes: of each operation on the device in turn, its name and the shapes of its tensors.
        noise: of each call of a noise kernel, where its arrays and its other tensors are: (storage, offset, shape).
    """

    def __init__(self, read: Callable[[torch.Size], Any] | None = None) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies: list[str] = []
        self.shapes: list[tuple[str, list[torch.Size]]] = []
        self.noise: list[tuple[list[Place], list[Place]]] = []
        self._held: list[Any] = []  # so that no new tensor gets the address of an old one
        self._read = read
        self._tolist = [mock.patch.object(kind, "tolist", lambda x: self.tolist(x)) for kind in (Tensor, FakeTensor)]
        self._plain_tolist = Tensor.tolist

    def __enter__(self) -> "HostWaits":
        super().__enter__()
        for patch in self._tolist:
            patch.start()  # torch would read the elements one by one where a mode is active
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in self._tolist:
            patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function._schema.name
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(x.device.type != "cpu" for x in given)
        if on_device and not name.startswith("prim::"):
            self.shapes.append((name, [x.shape for x in given]))
            if name == "mezo::noise":
                self._held += [x.untyped_storage() for x in given]
                self.noise.append(([place(x) for x in args[1]], [place(x) for x in args[2]]))
            indices = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor)] if name in INDEXING else []
            if name in WAITING or any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.waits.append(f"{name} {calling_line()}")
            if name in MOVING:
                self.copies += [f"blocking {name} {calling_line()}" for x in given if x.device.type == "cpu"]
        if name == "aten::_local_scalar_dense" and self._read is not None:
            return self._read(torch.Size())
        out = function(*args, **kwargs)
        if name in ("aten::_to_copy", "aten::copy_"):
            source, target = args[1] if name == "aten::copy_" else args[0], out
            if source.device.type != "cpu" and target.device.type == "cpu":
                self.waits.append(f"{name} {calling_line()}")
            elif source.device.type == "cpu" and target.device.type != "cpu" and source.numel():
                blocks = not (kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:] == (True,)))
                self.copies.append(f"{'blocking ' if blocks else ''}{name} {calling_line()}")
        return out

    def tolist(self, tensor: Tensor) -> Any:
        """Read a tensor; one of the device is one wait, whatever its size."""
        if tensor.device.type == "cpu":
            fake = isinstance(tensor, FakeTensor) and self._read is not None  # copied from the device before
            if fake and not tensor.dtype.is_floating_point:  # an index, perhaps
                return np.zeros(tensor.shape, int).tolist()
            return self._read(tensor.shape) if fake else self._plain_tolist(tensor)  # type: ignore[misc]
        self.waits.append(f"tolist {calling_line()}")
        if self._read is not None:
            return self._read(tensor.shape)
        with torch.utils._python_dispatch._disable_current_modes():
            return self._plain_tolist(tensor)


def place(x: Tensor) -> Place:
    """Return where a tensor is: its storage, the offset in it, and the shape."""
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape)


def moved(one: HostWaits, other: HostWaits) -> list[str]:
    """Return what differs between two steps: other operations or shapes, and where the noise kernels found their data.

    Not compared are activations: what is drawn for the rows that a batch looks up, and new outputs.
    """
    pairs = enumerate(zip(one.shapes, other.shapes, strict=False))
    found = [f"operation {i}: {a}, then {b}" for i, (a, b) in pairs if a != b][:3]
    if len(one.shapes) != len(other.shapes):
        found.append(f"{len(one.shapes)} operations, then {len(other.shapes)}")
    for i, ((arrays, rest), (arrays_then, rest_then)) in enumerate(zip(one.noise, other.noise, strict=False)):
        if rest[0] == rest_then[0] and (arrays[0], rest) != (arrays_then[0], rest_then):
            found.append(f"noise {i}: {arrays[0]} {rest}, then {arrays_then[0]} {rest_then}")
    fixed = sum(a[1][0] == b[1][0] for a, b in zip(one.noise, other.noise, strict=False))
    return found if fixed else [*found, "no call of the noise is where it was"]


def calling_line() -> str:
    """Return the innermost line of this repository and of any package but torch: `path:line function`."""
    frames = [f for f in traceback.extract_stack() if f.filename not in (__file__, "<string>")]
    frames = [f for f in frames if "/torch/" not in f.filename]
    ours = [f for f in frames if f.filename.startswith(str(ROOT / "mezo_cli"))]
    places = []
    for f in [*ours[-1:], *frames[-1:]]:
        path = f.filename.removeprefix(f"{ROOT}/").partition("site-packages/")
        places.append(f"{path[2] or path[0]}:{f.lineno} {f.name}")
    return " < ".join(dict.fromkeys(places))
