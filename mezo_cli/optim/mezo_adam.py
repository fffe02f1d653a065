"""MeZO-Adam (paper, arXiv 2305.17333, section 2.2): Adam (Kingma and Ba 2015, arXiv 1412.6980) on the estimate G = g z.

    m_t = b1 m_(t-1) + (1 - b1) G_t,   v_t = b2 v_(t-1) + (1 - b2) G_t^2,
    theta <- (1 - lr wd) theta - lr (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t)) + adam_eps)

which is torch.optim.AdamW fed with g z for a gradient (the reference does so, with full `.grad` buffers): the weight
decay is AdamW's, apart from the moments. G is the mean over n samples. No state is ever written to disk.

- `noise: rademacher` with one sample: z^2 = 1, so every element of v is the same number, sum (1 - b2) b2^(t-s) g_s^2.
  It is kept as that one number, from all steps and exact, and what is left is momentum with a rate of its own at each
  step: m in a buffer, or by `window`, as in `mezo_momentum`.
- every other noise, or more samples: v differs from element to element, so m and v are two buffers of theta's size,
  rebuilt from all steps before at a resume or a replay. A window is refused there: v looks back over 1 / (1 - b2) =
  1,000 steps, and to draw so many directions at each step would take longer than the forwards.

A step draws z once a sample, or, with `window: W`, W times.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mezo_cli.optim.mezo import Record
from mezo_cli.optim.mezo_momentum import MezoMomentum, Update, take
from mezo_cli.params import Params
from mezo_cli.schema import OptimizerConfig


@dataclass(frozen=True)
class CorrectedUpdate(Update):
    """One step's where v is stored: its terms are those of G, and v is multiplied by `correction` before its root."""

    correction: float


class MezoAdam(MezoMomentum):
    """Adam, its second moment a number where the noise allows it."""

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        self._square = 0.0  # v, where it is one number
        self._squares: dict[str, Tensor] = {}  # v, flat, elsewhere
        self._power1 = self._power2 = 1.0  # b1^t and b2^t, by products: a library's power may differ in the last place

    @property
    def one_number(self) -> bool:
        """Whether all of v is one number."""
        return self.config.noise == "rademacher" and self.config.samples == 1

    def decay_of_moment(self) -> float:
        """What the first moment is multiplied by at each step."""
        return self.config.beta1

    def plan(self, record: Record) -> Update:
        """Say what a step does; where v is stored, `rate` is lr with the correction of m, and `move` sees to v."""
        _, grads, lr = record
        b2 = self.config.beta2
        self._power1, self._power2 = self._power1 * self.beta, self._power2 * b2
        rate, decay = lr / (1 - self._power1), 1.0 - lr * self.config.weight_decay
        if self.one_number:
            self._square = b2 * self._square + (1 - b2) * grads[0] * grads[0]
            rate /= math.sqrt(self._square / (1 - self._power2)) + self.config.adam_eps
            return Update(self.estimate(record, 1 - self.beta), rate, decay)
        return CorrectedUpdate(self.estimate(record, 1.0), rate, decay, 1 / (1 - self._power2))

    def move(self, params: Params, updates: list[Update], write: bool) -> None:
        """Do updates to m, to v where it is stored, and, where `write`, to theta."""
        if self.one_number:
            super().move(params, updates, write)
            return
        b1, b2, eps = self.beta, self.config.beta2, self.config.adam_eps
        for name, start, theta in params.blocks():
            part = slice(start, start + len(theta))
            m = self.buffer(self._moment, params, name)[part]
            v = self.buffer(self._squares, params, name)[part]
            estimate, step = torch.empty_like(theta), torch.empty_like(theta)
            for update in updates:
                assert isinstance(update, CorrectedUpdate)
                params.noise.update_(name, estimate.zero_(), update.terms, [1.0] * len(update.terms), start)
                m.mul_(b1).add_(torch.mul(estimate, 1 - b1, out=step))
                v.mul_(b2).add_(estimate.mul_(estimate).mul_(1 - b2))
                if write:
                    torch.mul(v, update.correction, out=step).sqrt_().add_(eps)
                    take(theta, torch.div(m, step, out=step).mul_(update.rate), update.decay)
