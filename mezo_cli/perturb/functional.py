"""Run one module with other tensors in place of its parameters, for one sign or for both.

In a paired forward a tensor is [2, ...]: the half computed with theta + eps z, then the half with theta - eps z.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

CACHE_LINE = 64  # bytes


class ScratchBuffer:
    """One buffer for perturbed weights, as large as the largest module needs: modules run one after another."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._parts: dict[tuple[int, int, torch.dtype], Tensor] = {}  # of the buffer
        self.used = 0  # bytes; more than one allocation where a module with parameters calls another

    @contextmanager
    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Yield an uninitialized tensor of `size` elements, the same one at every step; it is free again at exit."""
        start = self.used
        self.used += -(-size * dtype.itemsize // CACHE_LINE) * CACHE_LINE
        if self._buffer.numel() < self.used or self._buffer.device != device:
            # Views into the old buffer stay valid: they hold its storage.
            self._buffer, self._parts = torch.empty(self.used, dtype=torch.uint8, device=device), {}
        if (start, size, dtype) not in self._parts:
            self._parts[start, size, dtype] = self._buffer[start : start + size * dtype.itemsize].view(dtype)
        try:
            yield self._parts[start, size, dtype]
        finally:
            self.used = start


def swap_params(
    module: nn.Module,
    tensors: dict[str, Tensor],
    original_forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module's original forward with `tensors` in place of its parameters of the same names.

    Not `torch.func.functional_call`: it calls the module itself, so the patched forward would call itself without end
    and the module's hooks would run twice. It also takes several times longer, and a model has hundreds of modules.
    """
    module.__dict__.update(tensors)  # attribute look-up finds these before the registered parameters
    try:
        return original_forward(*args, **kwargs)
    finally:
        for name in tensors:
            del module.__dict__[name]


def split_signs(value: Any, index: int) -> Any:
    """Return one sign's half of a paired tensor (0: plus, 1: minus); any other value as it is."""
    return value.chunk(2)[index] if isinstance(value, Tensor) else value


def linear_per_sign(x: Tensor, parameters: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Apply each sign's (weight, bias) to its half of x: [2, ..., in] -> [2, ..., out], without a concatenation."""
    out = x.new_empty(*x.shape[:-1], len(parameters[0][0]))
    for half, target, (weight, bias) in zip(x.chunk(2), out.chunk(2), parameters, strict=True):
        flat, into = half.reshape(-1, x.shape[-1]), target.view(-1, out.shape[-1])
        if bias is None:
            torch.mm(flat, weight.t(), out=into)
        else:
            torch.addmm(bias, flat, weight.t(), out=into)
    return out
