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
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
MOVING = INDEXING | {"aten::where"}  # these copy an argument that is on the CPU to the device, and wait for the copy


class HostWaits(TorchDispatchMode):
    """Inside, `waits` and `copies` grow by one line of text per wait for the device and per copy to it.

    Args:
        read: stands in for reading values, (shape) -> nested lists of floats, on a device that has none. None: read.
    """

    def __init__(self, read: Callable[[torch.Size], Any] | None = None) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies: list[str] = []
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
