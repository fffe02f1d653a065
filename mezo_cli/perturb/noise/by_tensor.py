"""Noises that draw z tensor by tensor, and not inside the kernels that use it; that of torch's own generator."""

from collections.abc import Sequence
from math import prod
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction, Noise, Shape, Terms
from mezo_cli.perturb.noise.counter import Device
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
        whole = Piece(name, tuple(theta.shape), 0, theta.numel())
        return self.piece(direction, whole, theta.device, c).view(theta.shape)[rows]

    @torch.no_grad()
    def perturb(self, direction: Direction, span: Span, c: float, *outs: Tensor) -> None:
        """Write theta + c z and, with two outputs, theta - c z: see `Noise.perturb`."""
        for piece in span.pieces:
            cz = self.piece(direction, piece, span.theta.device, c)
            for sign, out in zip((1, -1), outs, strict=False):
                out[piece.part] = torch.add(span.theta[piece.part], cz, alpha=sign)

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
            target = theta[piece.part]
            for (direction, coefficient), decay in zip(terms, decays, strict=True):
                cz = self.piece(direction, piece, theta.device, coefficient)
                target.copy_(add_to_decayed(target, cz, decay, decay_in_float64))


class TorchNoise(NoiseByTensor):
    """z drawn on the CPU in float32, one whole tensor at a time, by a newly seeded `torch.Generator`: slow.

    The generator's seed is (step_seed << 32) + crc32(name), where step_seed is the step-th
    `RandomState(seed).randint(10**9)`. For sample s > 0 of a step (the published code has none) the name is "name#s".
    torch's CPU generator keeps only the low 32 bits of its seed, that is crc32(name): z is the same at every step. The
    bits are kept for a comparison with the published steps; a run warns of it. The methods are those of `Noise`.
    """

    name = "torch"
    tile = 16  # elements: a cache line
    block = 1 << 62  # more than any tensor has: a tensor is drawn whole

    def __init__(self) -> None:
        self._seed: int | None = None
        self._step_seeds: list[int] = []

    def describe_kernels(self) -> tuple[str, str]:
        """Return `none`: torch draws z."""
        return "none", ""

    def step_seed(self, seed: int, step: int) -> int:
        """Return draw number `step` (from 0) of `RandomState(seed).randint(10**9)`."""
        if seed != self._seed:
            self._seed, self._step_seeds, self._stream = seed, [], np.random.RandomState(seed)
        while len(self._step_seeds) <= step:
            self._step_seeds.extend(self._stream.randint(10**9, size=1024).tolist())
        return self._step_seeds[step]

    def z(
        self, direction: Direction, name: str, shape: Shape, device: Device, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return elements [start, stop) of z for that tensor, float32 [stop - start], in row-major order."""
        key = f"{name}#{direction.sample}" if direction.sample else name
        seed = (self.step_seed(direction.seed, direction.step) << 32) + crc32(key.encode())
        whole = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32).view(-1)
        return whole[start : prod(shape) if stop is None else stop].to(device)

    def begin_pass(self) -> None:
        """Do nothing: nothing is kept."""

    def piece(self, direction: Direction, piece: Piece, device: torch.device, c: float) -> Tensor:
        """Return c z of these elements: see `NoiseByTensor.piece`."""
        z = self.z(direction, piece.name, piece.shape, "cpu", piece.start, piece.start + piece.numel)
        return (z * torch.tensor(c, dtype=torch.float32)).to(device)


def scaled_rows(noise: Noise, direction: Direction, name: str, theta: Tensor, rows: Tensor, c: float) -> Tensor:
    """Return c z of some rows of theta, float32 [R, ...], by the kernels of a noise, which draw these rows alone."""
    cz = torch.empty(len(rows), *theta.shape[1:], device=theta.device)
    zeros = torch.zeros((), device=theta.device).expand(theta.shape)
    noise.perturb_rows(direction, name, zeros, rows, c, cz)
    return cz
