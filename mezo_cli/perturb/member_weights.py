"""Make the weights of one population member once, in a second copy, for the many forwards of a generation.

A patched forward draws z as its module runs, which is right for one forward per member and far too slow for one per
token. Here theta + c z of all trainable tensors is written to a second copy, in the compute dtype, and the model's
parameters get that copy as their data; the patches are set aside. theta's own memory is only read.

Where all that is trained are matrices of linear modules without a bias, as in a LoRA, several members go through the
model in one batch: each of these modules multiplies the rows of a member by that member's matrix.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.params import Params


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
