"""Run modules with other tensors in place of their parameters: of one sign, of both, or of population members.

In a paired forward a tensor is [2, ...]: the half computed with theta + eps z, then the half with theta - eps z.

A patched forward draws z as its module runs, which is right for one forward per member and far too slow for one per
token. So for a generation theta + c z of all trainable tensors is written to a second copy, in the compute dtype, and
the model's parameters get that copy as their data; the patches are set aside. theta's own memory is only read. Where
all that is trained are matrices of linear modules without a bias, as in a LoRA, several members go through the model in
one batch: each of these modules multiplies the rows of a member by that member's matrix.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.spans import Span
from mezo_cli.perturb.params import Params

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


class ModulePlan:
    """The perturbed and the rounded copies of a module's parameters. It is made once and used at every step.

    Args:
        params: the trainable tensors.
        perturbed: attribute of the module -> name of the tensor, of those that are perturbed.
        rounded: attribute -> parameter, of the others whose dtype is not the compute dtype.

    Attributes:
        names: `perturbed`, as given.
        has_unperturbed: whether there are copies without a perturbation.
        is_empty: whether the module sees its own parameters.
        perturbed: (span, outputs of each sign) in the buffer that `copies` was last given.
        rounded: (parameter, output), likewise.
    """

    def __init__(self, params: Params, perturbed: Mapping[str, str], rounded: Mapping[str, nn.Parameter]) -> None:
        self.spans = params.spans(perturbed.values())
        self.names, self._rounded = dict(perturbed), dict(rounded)
        devices = [params.tensors[name].device for name in perturbed.values()]
        devices += [p.device for p in rounded.values()]
        self.has_unperturbed, self.is_empty = bool(rounded), not (perturbed or rounded)
        self.device = next(iter(devices), torch.device("cpu"))
        self.perturbed: list[tuple[Span, list[Tensor]]] = []
        self.rounded: list[tuple[nn.Parameter, Tensor]] = []
        self._buffer: Tensor | None = None
        self._copies: list[dict[str, Tensor]] = []

    def size(self, num_signs: int) -> int:
        """Return the number of elements of all copies."""
        others = sum(p.numel() for p in self._rounded.values())
        return num_signs * sum(span.numel for span in self.spans) + others

    def copies(self, buffer: Tensor, num_signs: int) -> list[dict[str, Tensor]]:
        """Return attribute -> its copy in `buffer`, one dict per sign; copies without a perturbation serve both."""
        if buffer is not self._buffer or num_signs != len(self._copies):
            self._buffer, self._copies = buffer, [{} for _ in range(num_signs)]
            self.perturbed, self.rounded = [], []
            begin = 0
            for span in self.spans:
                outs = list(buffer[begin : begin + num_signs * span.numel].chunk(num_signs))
                begin += num_signs * span.numel
                self.perturbed.append((span, outs))
                for copy, out in zip(self._copies, outs, strict=True):
                    parts = {p.name: out[p.offset : p.offset + p.numel].view(p.shape) for p in span.pieces}
                    copy.update({key: parts[name] for key, name in self.names.items() if name in parts})
            for key, p in self._rounded.items():
                out = buffer[begin : begin + p.numel()].view(p.shape)
                begin += p.numel()
                self.rounded.append((p, out))
                for copy in self._copies:
                    copy[key] = out
        return self._copies


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


def linear_per_sign(x: Tensor, parameters: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Apply each sign's (weight, bias) to its part of x: [signs, ..., in] -> [signs, ..., out], without a `cat`."""
    out, signs = x.new_empty(*x.shape[:-1], len(parameters[0][0])), len(parameters)
    for half, target, (weight, bias) in zip(x.chunk(signs), out.chunk(signs), parameters, strict=True):
        flat, into = half.reshape(-1, x.shape[-1]), target.view(-1, out.shape[-1])
        if bias is None:
            torch.mm(flat, weight.t(), out=into)
        else:
            torch.addmm(bias, flat, weight.t(), out=into)
    return out


# --- population members, for the many forwards of a generation ---


class MemberWeights:
    """Second copies of the named tensors, for `count` members; the memory is used again for the next members.

    Attributes:
        tensors: name -> its copies, [members, ...].
    """

    def __init__(self, params: Params, names: Iterable[str], dtype: torch.dtype, count: int) -> None:
        self.names, self.dtype, self.count, self._params = list(names), dtype, count, params
        self._outs = [
            (span, span.theta.new_empty((count, span.numel), dtype=dtype)) for span in params.spans(self.names)
        ]
        self.tensors: dict[str, Tensor] = {
            piece.name: out[:, piece.offset : piece.offset + piece.numel].view(count, *piece.shape)
            for span, out in self._outs
            for piece in span.pieces
        }

    def write(self, member: int, direction: Direction | None, c: float) -> None:
        """Write a member's theta + c z, or theta where there is no direction, rounded to the dtype of the copies."""
        for span, outs in self._outs:
            if direction is None:
                outs[member].copy_(span.theta)
            else:
                self._params.noise.perturb(direction, span, c, outs[member])


class MemberRows:
    """Which rows of the batch that is running are of which of `count` members."""

    def __init__(self, count: int) -> None:
        self.count, self._rows = count, 0
        self._places: Tensor | None = None  # of the rows, where members do not have the same number of them

    def set(self, members: Sequence[int], device: torch.device) -> None:
        """Let the rows of the next batches be of these members, in ascending order."""
        sizes = [members.count(member) for member in range(self.count)]
        self._rows, width, self._places = len(members), max(sizes), None
        if min(sizes) < width:
            places = [member * width + row for member, size in enumerate(sizes) for row in range(size)]
            self._places = torch.tensor(places).to(device)
        self._padded = self.count * width

    def linear(self, weights: Tensor, x: Tensor) -> Tensor:
        """Multiply each row by its member's matrix: [members, out, in], [rows, ..., in] -> [rows, ..., out]."""
        flat = x.reshape(self._rows, -1, x.shape[-1])
        if self._places is not None:
            flat = flat.new_zeros(self._padded, *flat.shape[1:]).index_copy_(0, self._places, flat)
        product = torch.bmm(flat.reshape(self.count, -1, x.shape[-1]), weights.mT).view(*flat.shape[:2], -1)
        product = product if self._places is None else product[self._places]
        return product.view(*x.shape[:-1], -1)
