"""What names a direction z, and what every kind of noise can do with it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Direction(NamedTuple):
    """One z of a run: its seed, the step (from 0), and which of the step's n directions (n-SPSA)."""

    seed: int
    step: int
    sample: int = 0


class Noise(Protocol):
    """A family of directions: z is a function of (direction, tensor name, element index) and of nothing else."""

    kind: str

    def z(
        self,
        at: Direction,
        name: str,
        shape: Sequence[int],
        device: torch.device | str,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Return elements [start, stop) of z for that tensor, float32 [stop - start], row-major order."""

    def shift(
        self, at: Direction, name: str, theta: Tensor, c: float, out: Tensor, mirror: Tensor | None = None
    ) -> None:
        """out = theta + c z, and mirror = theta - c z; theta float32, the others float32 or bfloat16, contiguous."""

    def shift_rows(
        self,
        at: Direction,
        name: str,
        theta: Tensor,
        rows: Tensor,
        c: float,
        out: Tensor,
        mirror: Tensor | None = None,
    ) -> None:
        """out[i] = theta[rows[i]] + c z[rows[i]]: rows of `shift`'s results, bit for bit; theta [V, H], out [R, H]."""

    @property
    def block(self) -> int:
        """The elements that `update_` is best given at once; a part may begin at every multiple of it."""

    def update_(
        self,
        name: str,
        theta: Tensor,
        terms: Sequence[tuple[Direction, float]],
        decays: Sequence[float],
        start: int = 0,
    ) -> None:
        """theta <- decay * theta + coeff * z for each term in order, bit for bit as one call a term.

        theta may be a part of the tensor: its elements from `start` on.
        """
