"""Noise from torch's own generator, seeded per tensor name: slow; it allows a comparison with the published steps."""

from math import prod
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from mezo_cli.perturb.noise.by_tensor import NoiseByTensor
from mezo_cli.perturb.noise.counter import Device
from mezo_cli.perturb.noise.direction import Direction, Shape
from mezo_cli.perturb.noise.spans import Piece


class TorchNoise(NoiseByTensor):
    """z drawn on the CPU in float32, one whole tensor at a time, by a newly seeded `torch.Generator`.

    The generator's seed is (step_seed << 32) + crc32(name), where step_seed is the step-th
    `RandomState(seed).randint(10**9)`. For sample s > 0 of a step (the published code has none) the name is "name#s".
    torch's CPU generator keeps only the low 32 bits of its seed, that is crc32(name): z is the same at every step. The
    bits are kept for the comparison; a run warns of it. The methods are those of `Noise`.
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
