"""A noise that draws z tensor by tensor, and not inside the kernels that use it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mezo_cli.perturb.noise.direction import Direction, Noise, Terms
from mezo_cli.perturb.noise.kernels import add_to_decayed
from mezo_cli.perturb.noise.spans import Piece, Span


class NoiseByTensor:
    """A noise of which `piece` gives c z of neighbouring elements of one tensor. The methods are those of `Noise`."""

    has_factors = False

    def piece(self, direction: Direction, piece: Piece, device: torch.device, c: float) -> Tensor:
        """Return c z of these elements, float32 [piece.numel]: z and c in float32, their product rounded to it."""
        raise NotImplementedError

    def rows(self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float) -> Tensor:
        """Return c z of some rows of theta, float32 [R, ...]."""
        whole = Piece(name, tuple(theta.shape), 0, theta.numel(), 0)
        return self.piece(direction, whole, theta.device, c).view(theta.shape)[rows]

    @torch.no_grad()
    def perturb(self, direction: Direction, span: Span, c: float, *outs: Tensor) -> None:
        """Write theta + c z and, with two outputs, theta - c z: see `Noise.perturb`."""
        for piece in span.pieces:
            part, cz = part_of(piece), self.piece(direction, piece, span.theta.device, c)
            for sign, out in zip((1, -1), outs, strict=False):
                out[part] = torch.add(span.theta[part], cz, alpha=sign)

    @torch.no_grad()
    def perturb_rows(
        self, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float, *outs: Tensor
    ) -> None:
        """Write out[i] = theta[rows[i]] + c z[rows[i]], and with minus: see `Noise.perturb_rows`."""
        cz = self.rows(direction, name, theta, rows, c)
        for sign, out in zip((1, -1), outs, strict=False):
            out.copy_(torch.add(theta[rows], cz, alpha=sign))

    @torch.no_grad()
    def update_(
        self, span: Span, theta: Tensor, terms: Terms, decays: Sequence[float], decay_in_float64: bool = False
    ) -> None:
        """Apply theta <- decay theta + coefficient z for each term in order, in place: see `Noise.update_`."""
        for piece in span.pieces:
            target = theta[part_of(piece)]
            for (direction, coefficient), decay in zip(terms, decays, strict=True):
                cz = self.piece(direction, piece, theta.device, coefficient)
                target.copy_(add_to_decayed(target, cz, decay, decay_in_float64))


def scaled_rows(noise: Noise, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float) -> Tensor:
    """Return c z of some rows of theta, float32 [R, ...], by the kernels of a noise, which draw these rows alone."""
    cz = torch.empty(len(rows), *theta.shape[1:], device=theta.device)
    zeros = torch.zeros((), device=theta.device).expand(theta.shape)
    noise.perturb_rows(direction, name, zeros, rows, c, cz)
    return cz


def part_of(piece: Piece) -> slice:
    """Return where a piece is in its span."""
    return slice(piece.offset, piece.offset + piece.numel)
