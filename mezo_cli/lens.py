"""How a module is run with other tensors in the places of its parameters, on one side of a batch or on both.

A batch of both sides is [2, ...]: what is seen at theta + eps z lies before what is seen at theta - eps z.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LINE = 64  # bytes of a cache line


class Scratch:
    """The one buffer for displaced weights, as large as the largest module: modules run one after another."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes; a module that owns parameters may hold modules that do

    @contextmanager
    def room(self, size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Lend `size` elements."""
        start = self._used
        self._used += -(-size * dtype.itemsize // LINE) * LINE
        if self._buffer.numel() < self._used or self._buffer.device != device:
            # Views into the old buffer stay valid: they hold its storage.
            self._buffer = torch.empty(self._used, dtype=torch.uint8, device=device)
        try:
            yield self._buffer[start : start + size * dtype.itemsize].view(dtype)
        finally:
            self._used = start


def shadowed(
    module: nn.Module, shadow: dict[str, Tensor], plain: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run `plain`, the module's forward, with tensors in the places of its parameters."""
    module.__dict__.update(shadow)  # found before the registered parameters of the same names
    try:
        return plain(*args, **kwargs)
    finally:
        for key in shadow:
            del module.__dict__[key]


def half(value: Any, side: int) -> Any:
    """Return one side's half of a tensor that carries both; anything else as it is."""
    return value.chunk(2)[side] if isinstance(value, Tensor) else value


def linear_of_both(x: Tensor, sides: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """[2, ..., in] -> [2, ..., out]: each side by its own weight and bias, written where it belongs."""
    out = x.new_empty(*x.shape[:-1], len(sides[0][0]))
    for read, written, (weight, bias) in zip(x.chunk(2), out.chunk(2), sides, strict=True):
        flat, into = read.reshape(-1, x.shape[-1]), written.view(-1, out.shape[-1])
        if bias is None:
            torch.mm(flat, weight.t(), out=into)
        else:
            torch.addmm(bias, flat, weight.t(), out=into)
    return out


def leaves(output: Tensor) -> set[int]:
    """Return the ids of the leaf tensors in the graph behind `output`."""
    found: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack.extend(parent for parent, _ in node.next_functions)
    return found
