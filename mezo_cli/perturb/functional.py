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
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.spans import Span
from mezo_cli.perturb.params import Params

CACHE_LINE = 64  # bytes
JOINED = 1 << 14  # elements that a CPU normalizes for both signs at once: of more it would read them from memory twice

Copies = dict[str, Tensor]  # attribute of a module -> as each sign sees it, [signs, ...]
Calls = dict[nn.Module, Callable[..., Any]]  # what runs each module


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


class Owner(NamedTuple):
    """A module, and which of its parameters its forward sees copies of.

    Args:
        module: the module.
        forward: its original forward.
        perturbed: attribute of the module -> name of the tensor, of those that are perturbed.
        rounded: attribute -> parameter, of the others whose dtype is not the compute dtype.
    """

    module: nn.Module
    forward: Callable[..., Any]
    perturbed: Mapping[str, str]
    rounded: Mapping[str, nn.Parameter]


class Plan:
    """The perturbed and the rounded copies of the parameters of modules that are written together, made once.

    Args:
        params: the trainable tensors.
        owners: one module, or the modules of a layer.

    Attributes:
        spans: of the tensors that are perturbed.
        is_empty: whether the modules see their own parameters.
        perturbed: (span, outputs of each sign) in the buffer that `calls` was last given.
        rounded: (parameter, output), likewise.
    """

    def __init__(self, params: Params, owners: Sequence[Owner]) -> None:
        self._owners = owners
        self.spans = params.spans(name for owner in owners for name in owner.perturbed.values())
        self._rounded = list({p for owner in owners for p in owner.rounded.values()})
        self.is_empty = not (self.spans or self._rounded)
        devices = [*(span.theta.device for span in self.spans), *(p.device for p in self._rounded)]
        self.device = next(iter(devices), torch.device("cpu"))
        self.perturbed: list[tuple[Span, Sequence[Tensor]]] = []
        self.rounded: list[tuple[nn.Parameter, Tensor]] = []
        self._made_for: tuple[Any, ...] = ()
        self._calls: Calls = {}

    def size(self, num_signs: int) -> int:
        """Return the number of elements of all copies."""
        return num_signs * sum(span.numel for span in self.spans) + sum(p.numel() for p in self._rounded)

    def calls(self, buffer: Tensor, num_signs: int, call_of: "Callable[[Owner, Copies], Callable[..., Any]]") -> Calls:
        """Return what runs each module with its copies in `buffer`: `call_of` says how, and is asked once per buffer.

        A copy is [signs, ...]; one without a perturbation is the same memory for both.
        """
        if self._made_for and self._made_for[0] is buffer and self._made_for[1:] == (num_signs, call_of):
            return self._calls
        begin, tensors, copied = 0, dict[str, Tensor](), dict[nn.Parameter, Tensor]()
        self.perturbed, self.rounded = [], []
        for span in self.spans:
            outs = buffer[begin : begin + num_signs * span.numel].view(num_signs, span.numel)
            begin += num_signs * span.numel
            self.perturbed.append((span, outs.unbind()))
            for p in span.pieces:
                tensors[p.name] = outs[:, p.offset : p.offset + p.numel].view(num_signs, *p.shape)
        for parameter in self._rounded:
            out = buffer[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()
            self.rounded.append((parameter, out))
            copied[parameter] = out.expand(num_signs, *out.shape)
        self._calls = {}
        for owner in self._owners:
            copies = {key: tensors[name] for key, name in owner.perturbed.items()}
            copies |= {key: copied[p] for key, p in owner.rounded.items()}
            self._calls[owner.module] = call_of(owner, copies) if copies else owner.forward
        self._made_for = buffer, num_signs, call_of
        return self._calls


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
