"""MeZO-Adam (paper, arXiv 2305.17333, section 2.2): Adam (Kingma and Ba 2015, arXiv 1412.6980) on the estimate G = g z.

    m_t = b1 m_(t-1) + (1 - b1) G_t,   v_t = b2 v_(t-1) + (1 - b2) G_t^2,
    theta <- (1 - lr wd) theta - lr (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t)) + adam_eps)

This is torch.optim.AdamW with g z as the gradient (as in the published code, which fills `.grad`). G is the mean
over n samples. The buffers are stored in the checkpoint `last`, as those of mezo_momentum.py.

- `noise: rademacher` with one sample: z^2 = 1, so all elements of v are the same number, sum (1 - b2) b2^(t-s) g_s^2.
  It is kept as one number, exact over all steps. What remains is momentum with a rate per step: m in a buffer, or with
  `window`, as in mezo_momentum.py.
- other noise, or more samples: v differs per element, so m and v are two buffers of theta's size, rebuilt from all
  steps before where they are not stored. `window` is rejected: v looks back over 1 / (1 - b2) = 1,000 steps,
  and drawing so many directions per step would take longer than the forwards.

A step draws z once per sample, or W times with `window: W`.
"""

import math
from typing import TYPE_CHECKING

from mezo_cli.config.optimizers import MezoAdamConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.mezo_momentum import Update, WithMoment
from mezo_cli.optim.moments import Moment, Scratch

if TYPE_CHECKING:
    from mezo_cli.perturb.params import Params


class MezoAdam(WithMoment):
    """MeZO-Adam. The second moment is one number where all its elements are equal."""

    config: MezoAdamConfig
    moments = ("_m", "_v")
    scalars = ("_next", "_scalar_v", "_power1", "_power2")

    def __init__(self, config: MezoAdamConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps, config.beta1, config.window)
        self._scalar_v = 0.0  # the second moment, where it is one number
        self._v, self._estimate = Moment(), Scratch()  # elsewhere
        self._power1 = self._power2 = 1.0  # b1^t and b2^t, by products: a library's power may differ in the last place

    def plan_update(self, record: StepRecord) -> Update:
        """Return the update of a step. Where v is a buffer, `rate` is lr with the correction of m alone."""
        grads, lr = self.gradients(record), record[2]
        b2 = self.config.beta2
        self._power1, self._power2 = self._power1 * self.beta, self._power2 * b2
        rate, decay = lr / (1 - self._power1), 1.0 - lr * self.config.weight_decay
        if self.config.second_moment_is_scalar:
            self._scalar_v = b2 * self._scalar_v + (1 - b2) * grads[0] * grads[0]
            rate /= math.sqrt(self._scalar_v / (1 - self._power2)) + self.config.adam_eps
            return Update(self.estimate(record, 1 - self.beta), rate, decay)
        return Update(self.estimate(record, 1.0), rate, decay, 1 / (1 - self._power2))

    def step_params(self, params: "Params", updates: list[Update], write: bool) -> None:
        """Update m, v and, with `write`, theta by each update in order."""
        import torch

        if self.config.second_moment_is_scalar:
            super().step_params(params, updates, write)
            return
        b1, b2, eps = self.beta, self.config.beta2, self.config.adam_eps
        for span in params.blocks():
            theta, m, v = params.load(span), self._m.view(span), self._v.view(span)
            estimate, step = self._estimate.view(span), self._step.view(span)
            for update in updates:
                params.noise.update_(span, estimate.zero_(), update.terms, [1.0] * len(update.terms))
                m.mul_(b1).add_(torch.mul(estimate, 1 - b1, out=step))
                v.mul_(b2).add_(estimate.mul_(estimate).mul_(1 - b2))
                if write:
                    torch.mul(v, update.correction, out=step).sqrt_().add_(eps)
                    params.decay_and_subtract(theta, torch.div(m, step, out=step).mul_(update.rate), update.decay)
                    params.round_(span, theta, update.terms[0][0])
            if write:
                params.store(span, theta)
