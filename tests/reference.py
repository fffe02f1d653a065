"""The reference's step, written from its published description: perturb in place, forward, perturb back, update.

It shares nothing with `mezo_cli`: the stock Hugging Face forward with the whole vocabulary at every position, four
passes over the weights, torch's own generator keyed by tensor name.
"""

import zlib
from collections.abc import Callable

import numpy as np
import torch


class Reference:
    """MeZO as the paper's code does it, with `noise: torch`'s stream."""

    def __init__(self, model: torch.nn.Module, lr: float, eps: float, weight_decay: float, seed: int) -> None:
        self.model, self.lr, self.eps, self.weight_decay = model.eval(), lr, eps, weight_decay
        self.stream = np.random.RandomState(seed)

    def _perturb(self, step_seed: int, scale: float) -> None:
        for name, p in self.model.named_parameters():
            p.data = p.data + scale * self._z(step_seed, name, p)

    def _z(self, step_seed: int, name: str, p: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed((step_seed << 32) + zlib.crc32(name.encode()))
        return torch.randn(p.shape, generator=generator)

    @torch.no_grad()
    def step(self, loss: Callable[[torch.nn.Module], float]) -> tuple[float, float]:
        """Do one step; return loss_plus and loss_minus."""
        step_seed = int(self.stream.randint(10**9))
        self._perturb(step_seed, self.eps)
        plus = loss(self.model)
        self._perturb(step_seed, -2 * self.eps)
        minus = loss(self.model)
        self._perturb(step_seed, self.eps)
        g = (plus - minus) / (2 * self.eps)
        for name, p in self.model.named_parameters():
            p.data = p.data - self.lr * (g * self._z(step_seed, name, p) + self.weight_decay * p.data)
        return plus, minus
