"""z divided by numbers per element, as the forwards of HiZOO see it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction, Noise
from mezo_cli.perturb.noise.by_tensor import NoiseByTensor, scaled_rows
from mezo_cli.perturb.noise.kernels import call_size
from mezo_cli.perturb.noise.spans import Span


class DividedNoise(NoiseByTensor):
    """z divided by a number per element of theta, as the forwards of a preconditioned method see it.

    Args:
        base: the noise of z.
        span_of: name of a tensor -> its span of theta.
        divisor: span of theta -> the numbers, float32 [span.numel], or those of some rows of a span with one tensor, of
            (span, shape, rows). They are read at once.
    """

    def __init__(self, base: Noise, span_of: Mapping[str, Span], divisor: Callable[..., Tensor]) -> None:
        self._base, self._span_of, self._divisor = base, span_of, divisor

    @torch.no_grad()
    def perturb(self, direction: Direction, span: Span, c: float, *outs: Tensor) -> None:
        """Write theta + c z / d and, with two outputs, theta - c z / d: see `Noise.perturb`."""
        for chunk, part in span.split(call_size(self._base.block, span.theta.device)):
            step = torch.zeros(part.numel, device=span.theta.device)
            self._base.update_(part, step, [(direction, c)], [1.0])
            step.div_(self._divisor(part))
            for sign, out in zip((1, -1), outs, strict=False):
                out[chunk] = torch.add(part.theta, step, alpha=sign)

    def rows(self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float) -> Tensor:
        """Return c z / d of some rows of theta, float32 [R, ...]."""
        divisor = self._divisor(self._span_of[name], theta.shape, rows)
        return scaled_rows(self._base, direction, name, theta, rows, c).div_(divisor)
