"""Run modules with other tensors in place of their parameters, of one sign or of both.

In a paired forward a tensor is [2, ...]: the half computed with theta + eps z, then the half with theta - eps z.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

JOINED = 1 << 14  # elements that a CPU normalizes for both signs at once: of more it would read them from memory twice


def swap_params(
    module: nn.Module, tensors: Mapping[str, Tensor], original_forward: Callable[..., Any], *args: Any, **kwargs: Any
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


@contextmanager
def swapped(attribute: str, values: Mapping[Any, Any]) -> Iterator[None]:
    """Give each object another value of an attribute inside: parameters other `data`, modules another `forward`."""
    before = {owner: getattr(owner, attribute) for owner in values}
    try:
        for owner, value in values.items():
            object.__setattr__(owner, attribute, value)  # nn.Module's own way looks through all of its tables
        yield
    finally:
        for owner, value in before.items():
            object.__setattr__(owner, attribute, value)


def split_signs(value: Any, index: int) -> Any:
    """Return one sign's half of a paired tensor (0: plus, 1: minus); any other value as it is."""
    return value.chunk(2)[index] if isinstance(value, Tensor) else value


class PairedLinear:
    """A linear layer for both signs: [signs, ..., in] -> [signs, ..., out], each half by its own weight and bias.

    Where that has the same bits and is not slower, by one product of both.

    Args:
        weight: [signs, out, in].
        bias: [signs, out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.mT, None if bias is None else bias.unsqueeze(1)
        self._signs, self._in, self._out = weight.shape[0], weight.shape[2], weight.shape[1]
        # A CPU's libraries may add in another order. In half precision a check of a few elements would not show it.
        self._may_join = weight.device.type != "cpu" or (weight.dtype == torch.float32 and weight[0].numel() <= JOINED)
        self._parts = [*zip(self._weight, [None] * self._signs if bias is None else bias, strict=True)]

    def __call__(self, input: Tensor) -> Tensor:
        """Multiply."""
        shape = input.shape
        x = input if len(shape) == 3 and shape[0] == self._signs else input.reshape(self._signs, -1, self._in)
        if self._may_join and (
            not x.is_cpu or _has_bits_of_parts(x.shape[1], self._in, self._out, torch.get_num_threads())
        ):
            out = torch.bmm(x, self._weight) if self._bias is None else torch.baddbmm(self._bias, x, self._weight)
        else:
            out = linear_per_sign(self._parts, x)
        return out if x is input else out.view(*shape[:-1], self._out)


def linear_per_sign(parameters: Sequence[tuple[Tensor, Tensor | None]], x: Tensor) -> Tensor:
    """Apply each sign's (transposed weight, bias) to its part: [signs, n, in] -> [signs, n, out], without a `cat`."""
    out = x.new_empty(len(parameters), x.shape[1], parameters[0][0].shape[1])
    for half, into, (weight, bias) in zip(x.unbind(), out.unbind(), parameters, strict=True):
        if bias is None:
            torch.mm(half, weight, out=into)
        else:
            torch.addmm(bias, half, weight, out=into)
    return out


@lru_cache(maxsize=4096)
def _has_bits_of_parts(rows: int, width: int, out: int, threads: int) -> bool:
    """Return whether this machine's float32 product of two pairs of matrices has the bits of two products."""
    x, weight = (
        torch.linspace(a, 1.0, n * width).sin_().view(2, -1, width) for a, n in ((-50.0, 2 * rows), (90.0, 2 * out))
    )
    bias = torch.linspace(-1.0, 2.0, 2 * out).view(2, 1, out)
    apart = linear_per_sign([*zip(weight.mT, bias.view(2, out), strict=True)], x)
    return torch.equal(torch.baddbmm(bias, x, weight.mT), apart) and torch.equal(
        torch.bmm(x, weight.mT), linear_per_sign([(w, None) for w in weight.mT], x)
    )


def layer_norm_per_sign(norm: nn.LayerNorm, weight: Tensor, bias: Tensor, input: Tensor) -> Tensor:
    """Apply each sign's weight and bias, [signs, 1, width], to its part of a tensor: [signs, ..., width], as it came.

    In float32 by one normalization of both parts, where that has the same bits and is not slower.
    """
    shape, on_cpu = norm.normalized_shape, input.device.type == "cpu"
    if input.dtype != torch.float32 or (on_cpu and (input.numel() > JOINED or not _affine_is_apart(weight.shape[2]))):
        parts = zip(input.chunk(weight.shape[0]), weight, bias, strict=True)
        return torch.cat([F.layer_norm(half, shape, w[0], b[0], norm.eps) for half, w, b in parts])
    normalized = F.layer_norm(input, shape, None, None, norm.eps).view(weight.shape[0], -1, weight.shape[2])
    return torch.addcmul(bias, normalized, weight).view(input.shape)


@cache
def _affine_is_apart(width: int) -> bool:
    """Return whether this machine's layer norm of that width has the bits of a normalization and then `addcmul`."""
    x, weight, bias = (torch.linspace(a, 1.0, 8 * width).sin_().view(8, width) for a in (-40.0, 30.0, 20.0))
    whole = F.layer_norm(x, (width,), weight[0], bias[0])
    return torch.equal(whole, torch.addcmul(bias[0], F.layer_norm(x, (width,)), weight[0]))


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether a module looks up rows and no more.

    A subclass's own forward may scale them, or find positions; with `max_norm` rows are scaled first.
    """
    plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return plain and module.max_norm is None
