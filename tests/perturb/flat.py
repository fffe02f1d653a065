"""Apply noise to one plain tensor: lay it out in flat storage, and copy the results back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction, Noise
from mezo_cli.perturb.noise.spans import Segment, Span, tiles_of


def lay_out(noise: Noise, name: str, theta: Tensor) -> Span:
    """Return a span of a copy of the tensor."""
    flat = torch.zeros(tiles_of(theta.numel(), noise.tile) * noise.tile)
    flat[: theta.numel()] = theta.detach().view(-1)
    return Segment(flat, [(name, tuple(theta.shape))], noise.tile).whole


def perturb(noise: Noise, direction: Direction, name: str, theta: Tensor, c: float, *outs: Tensor) -> None:
    """Write theta + c z to the first output, theta - c z to the second."""
    span = lay_out(noise, name, theta)
    padded = [torch.full((span.numel,), torch.nan, dtype=out.dtype) for out in outs]
    noise.perturb(direction, span, c, *padded)
    for out, values in zip(outs, padded, strict=True):
        out.copy_(values[: out.numel()].view(out.shape))


def update_(
    noise: Noise,
    name: str,
    theta: Tensor,
    terms: Sequence[tuple[Direction, float]],
    decays: Sequence[float],
    decay_in_float64: bool = False,
) -> None:
    span = lay_out(noise, name, theta)
    noise.update_(span, span.theta, terms, decays, decay_in_float64)
    theta.data.copy_(span.theta[: theta.numel()].view(theta.shape))
