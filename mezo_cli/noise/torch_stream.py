"""Torch's own generator, keyed by tensor name: slow, and there to be held against the reference step by step."""

from collections.abc import Sequence
from math import prod
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from mezo_cli.noise.direction import Direction


class TorchNoise:
    """z drawn on the CPU in float32 by a `torch.Generator` seeded afresh for each tensor, whole.

    The generator's seed is (step_seed << 32) + crc32(name), where step_seed is the step-th
    `RandomState(seed).randint(10**9)`. For sample s > 0 of a step (the reference has none) the name is "name#s".
    """

    kind = "torch"
    block = 1 << 62  # a tensor is drawn whole

    def __init__(self) -> None:
        self._seed: int | None = None
        self._step_seeds: list[int] = []

    def step_seed(self, seed: int, step: int) -> int:
        """Return the draw of `RandomState(seed).randint(10**9)` number `step`, from 0."""
        if seed != self._seed:
            self._seed, self._step_seeds, self._stream = seed, [], np.random.RandomState(seed)
        while len(self._step_seeds) <= step:
            self._step_seeds.extend(self._stream.randint(10**9, size=1024).tolist())
        return self._step_seeds[step]

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
        word = f"{name}#{at.sample}" if at.sample else name
        generator = torch.Generator().manual_seed((self.step_seed(at.seed, at.step) << 32) + crc32(word.encode()))
        whole = torch.randn(tuple(shape), generator=generator, dtype=torch.float32).view(-1)
        return whole[start : prod(shape) if stop is None else stop].to(device)

    @torch.no_grad()
    def shift(
        self, at: Direction, name: str, theta: Tensor, c: float, out: Tensor, mirror: Tensor | None = None
    ) -> None:
        """out = theta + c z, mirror = theta - c z: c z is rounded to float32, the sum to float32, and to out.dtype."""
        step = self._step(at, name, theta, c)
        out.copy_(theta + step)
        if mirror is not None:
            mirror.copy_(theta - step)

    @torch.no_grad()
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
        """out[i] = theta[rows[i]] + c z[rows[i]], mirror with a minus; draws the whole table's noise."""
        step = self._step(at, name, theta, c)[rows]
        out.copy_(theta[rows] + step)
        if mirror is not None:
            mirror.copy_(theta[rows] - step)

    @torch.no_grad()
    def update_(
        self,
        name: str,
        theta: Tensor,
        terms: Sequence[tuple[Direction, float]],
        decays: Sequence[float],
        start: int = 0,
    ) -> None:
        """theta <- decay * theta + coeff * z for each term in order, rounded as `CounterNoise.update_` rounds."""
        assert start == 0  # a tensor is drawn whole
        for (at, coeff), decay in zip(terms, decays, strict=True):
            step = self._step(at, name, theta, coeff)
            if np.float32(decay) == 1.0:
                theta.add_(step)  # the same bits: a float32 sum does not change when it is taken in float64 first
            else:
                home = torch.device("cpu") if theta.device.type == "mps" else theta.device  # MPS has no float64
                exact = theta.to(home).double() * np.float32(decay).item() + step.to(home).double()
                theta.copy_(exact)

    def _step(self, at: Direction, name: str, theta: Tensor, c: float) -> Tensor:
        z = self.z(at, name, theta.shape, "cpu").view(theta.shape)
        return (z * torch.tensor(c, dtype=torch.float32)).to(theta.device)
