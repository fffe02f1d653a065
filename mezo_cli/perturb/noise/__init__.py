"""Directions z that are drawn again whenever they are needed, never stored: what a noise is (docs/concepts/noise.md).

`NOISES` (config/registry.py) names the kinds of `optimizer.noise`; a new kind is one class and one row there. This
module imports no torch, so that a config can be checked without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from mezo_cli.config.registry import NOISES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mezo_cli.perturb.noise.spans import Span

    Device = torch.device | str


class Direction(NamedTuple):
    """The name of one z of a run: its seed, the step (from 0), and the sample (n-SPSA draws several per step)."""

    seed: int
    step: int
    sample: int = 0


def to_float32(value: float) -> float:
    """Return the nearest float32, as kernels take and trajectories store it; a value out of range becomes infinite."""
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.float32(value))


class Factors(NamedTuple):
    """z = left right^T of a matrix, float32 [m, r] and [n, r]."""

    left: Tensor
    right: Tensor


Terms = Sequence[tuple[Direction, float]]  # of a sum of coefficient z
Shape = Sequence[int]


class Noise(Protocol):
    """A kind of noise: z is a function of (direction, tensor name, element index) and of nothing else.

    Attributes:
        name: its name.
        tile: elements per tile of the flat storage that it works on (`spans`).
        block: how many elements an optimizer with buffers should update at once on a CPU.
        has_factors: whether `factors` gives those of matrices, with which a linear layer computes.
    """

    name: str
    tile: int
    block: int
    has_factors: bool

    def describe_kernels(self) -> tuple[str, str]:
        """Return how this process runs the kernels, and the reason if they are slower than they could be, else "".

        The first is `compiled`, `eager`, or `none` without kernels.
        """

    def z(
        self, direction: Direction, name: str, shape: Shape, device: Device, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return elements [start, stop) of z for that tensor, float32 [stop - start], in row-major order."""

    def factors(self, direction: Direction, name: str, shape: Shape, device: torch.device) -> Factors | None:
        """Return the factors of z of a tensor, of a noise that `has_factors`; None for a tensor whose z has none."""

    def perturb(self, direction: Direction, span: Span, c: float, *outs: Tensor) -> None:
        """Write theta + c z and, with two outputs, theta - c z, of the same z (an antithetic pair).

        c z is rounded to float32, then the sum is, then it is rounded to the output's dtype.

        Args:
            direction: names z.
            span: of theta: float32, or float16 or bfloat16, which are widened first.
            c: the coefficient, rounded to float32.
            outs: one or two, [span.numel], in any of these dtypes, contiguous; may not overlap theta.
        """

    def perturb_rows(
        self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float, *outs: Tensor
    ) -> None:
        """Write out[i] = theta[rows[i]] + c z[rows[i]], and with minus: rows of what `perturb` writes, bit for bit.

        Args:
            direction: names z.
            name: the tensor's name in the model.
            theta: [V, ...], in a dtype as for `perturb`, contiguous.
            rows: int64 [R], each in [0, V).
            c: the coefficient, rounded to float32.
            outs: one or two, [R, ...], in a dtype as for `perturb`.
        """

    def begin_pass(self) -> None:
        """Say that a pass over the storage begins: what `update_` made for the terms before is not needed again."""

    def update_(
        self, span: Span, theta: Tensor, terms: Terms, decays: Sequence[float], decay_in_float64: bool = False
    ) -> None:
        """Apply theta <- decay theta + coefficient z for each term in order, in place.

        Bitwise identical to one call per term. coefficient is rounded to float32, then coefficient z is; its sum with
        decay theta is taken in float64 and rounded to float32 once. decay theta is the exact product with decay rounded
        to float32; or, with `decay_in_float64`, theta - d theta with d = 1 - decay rounded to float32, so that no decay
        is too weak: a float32 next to 1 is no nearer than 6e-8.

        Args:
            span: names the elements of z.
            theta: float32 [span.numel]: the span's own theta, or a buffer of an optimizer.
            terms: (direction, coefficient), in order.
            decays: one per term.
            decay_in_float64: for the weight decay of theta. The decay of a moment is a factor like any other.
        """


def make_noise(name: str) -> Noise:
    """Return a new noise of that name."""
    return cast("Noise", NOISES.load(name)())
