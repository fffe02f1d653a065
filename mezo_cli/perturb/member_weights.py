"""Make the weights of one population member once, in a second copy, for the many forwards of a generation.

A patched forward draws z as its module runs, which is right for one forward per member and far too slow for one per
token. Here theta + c z of all trainable tensors is written to a second copy, in the compute dtype, and the model's
parameters get that copy as their data; the patches are set aside. theta's own memory is only read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params


class MemberPlan(NamedTuple):
    """What the forwards of a member see in place of what.

    Attributes:
        tensors: the trainable ones that it was made for.
        names: of the trainable tensors that are copied.
        rounded: other parameters that are seen in another dtype -> whether their values may change.
        forwards: of the modules, without patches.
    """

    tensors: Mapping[str, nn.Parameter]
    names: list[str]
    rounded: dict[nn.Parameter, bool]
    forwards: dict[nn.Module, Callable[..., Any]]


class MemberWeights:
    """A second copy of trainable tensors; the memory is used again for the next member.

    Args:
        params: the trainable tensors.
        names: of those that are copied.
        dtype: of the copy.

    Attributes:
        names, dtype: as given.
        tensors: name -> its copy.
    """

    def __init__(self, params: Params, names: Iterable[str], dtype: torch.dtype) -> None:
        self.names, self.dtype, self._noise = list(names), dtype, params.noise
        self._outs = [(span, span.theta.new_empty(span.numel, dtype=dtype)) for span in params.spans(self.names)]
        self.tensors: dict[str, Tensor] = {
            piece.name: out[piece.offset : piece.offset + piece.numel].view(piece.shape)
            for span, out in self._outs
            for piece in span.pieces
        }

    def write(self, direction: Direction | None, c: float) -> None:
        """Write theta + c z, or theta where there is no direction, rounded to the dtype of the copy."""
        for span, out in self._outs:
            if direction is None:
                out.copy_(span.theta)
            else:
                self._noise.perturb(direction, span, c, out)


@contextmanager
def swapped_data(data: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Give parameters other data inside; tied modules share a parameter, so all of them see it."""
    before = {p: p.data for p in data}
    try:
        for p, tensor in data.items():
            p.data = tensor
        yield
    finally:
        for p, tensor in before.items():
            p.data = tensor


@contextmanager
def swapped_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules with patched forwards other ones inside."""
    before = {module: module.forward for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward  # nn.Module's own way looks through all of its tables
        yield
    finally:
        for module, forward in before.items():
            module.__dict__["forward"] = forward
