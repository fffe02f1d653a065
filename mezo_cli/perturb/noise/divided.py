"""z divided by a number per element of theta, as the forwards of a preconditioned method see it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mezo_cli.perturb.noise.by_tensor import NoiseByTensor, scaled_rows
from mezo_cli.perturb.noise.direction import Direction
from mezo_cli.perturb.noise.spans import Span

if TYPE_CHECKING:
    from mezo_cli.perturb.params import Params


class DividedNoise(NoiseByTensor):
    """The methods of `Noise` that forwards call, for z / d.

    Args:
        params: the trainable tensors; z is that of their noise.
        divisor: span of theta -> d of its elements, float32 [span.numel], which is read at once.
    """

    def __init__(self, params: "Params", divisor: Callable[[Span], Tensor]) -> None:
        self._params, self._base, self._divisor = params, params.noise, divisor

    @torch.no_grad()
    def perturb(self, direction: Direction, span: Span, c: float, out: Tensor, out_minus: Tensor | None = None) -> None:
        """Write out = theta + c z / d and, if given, out_minus = theta - c z / d: see `Noise.perturb`."""
        for chunk, part in span.split(self._base.block_size(span.theta.device)):
            step = torch.zeros(part.numel, device=span.theta.device)
            self._base.update_(part, step, [(direction, c)], [1.0])
            step.div_(self._divisor(part))
            out[chunk] = part.theta + step
            if out_minus is not None:
                out_minus[chunk] = part.theta - step

    def rows(self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float) -> Tensor:
        """Return c z / d of some rows of theta, float32 [R, ...]."""
        divisor = self._divisor(self._params.span_of(name))[: theta.numel()].view(theta.shape)
        return scaled_rows(self._base, direction, name, theta, rows, c).div_(divisor[rows])
