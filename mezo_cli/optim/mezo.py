"""MeZO, the paper's Algorithm 1 (Malladi et al. 2023, arXiv 2305.17333, section 2), and n-SPSA (its section 2.1).

    z ~ N(0, I),   g = (L(theta + eps z) - L(theta - eps z)) / (2 eps),   theta <- theta - lr (g z + wd theta)

n-SPSA averages g_i z_i over n directions drawn at the same theta (section 2.1); weight decay is applied once, to every
tensor. With `sample_schedule: linear` step t of T draws n_t = 1 + floor(n t / T) of them, from 1 to n in equal shares
(the reference's linear schedule is max(1, floor(n t / T)), which ends at n - 1). lr is not scaled with n_t.

State: none. A step is 2 n_t forwards, which displace theta as they run, and one pass over theta with n_t draws of z.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mezo_cli.noise import Direction
from mezo_cli.optim.step import LossFn, learning_rate
from mezo_cli.params import Params
from mezo_cli.schema import OptimizerConfig

Record = tuple[int, list[float], float]  # a step (from 0), its projected_grads, its lr


@dataclass(frozen=True)
class MezoResult:
    """What one step saw and did: its mean losses, and the scalars from which it can be replayed."""

    loss_plus: float
    loss_minus: float
    projected_grads: list[float]  # one a sample, rounded to float32 as they are stored
    lr: float  # rounded to float32 likewise

    @property
    def loss(self) -> float:
        """Mean of the losses on both sides."""
        return (self.loss_plus + self.loss_minus) / 2

    @property
    def projected_grad(self) -> float:
        """Mean over the samples."""
        return sum(self.projected_grads) / len(self.projected_grads)

    def scalars(self) -> dict[str, float]:
        """Return what a line of metrics.jsonl says of the step."""
        names = ("loss", "loss_plus", "loss_minus", "projected_grad", "lr")
        return {name: getattr(self, name) for name in names}


class Mezo:
    """The zeroth-order step. Its whole state is the number of steps done: theta follows from (seed, step, g, lr)."""

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None:
        self.config, self.seed, self.steps = config, seed, steps

    def lr(self, step: int) -> float:
        """Learning rate of step `step` (from 0)."""
        return learning_rate(self.config, step, self.steps)

    def samples(self, step: int) -> int:
        """Directions that step `step` draws: n_t."""
        n = self.config.samples
        return n if self.config.sample_schedule == "constant" else 1 + n * step // self.steps

    def passes(self, steps: int) -> dict[str, int]:
        """Two forwards a sample, no backward."""
        return {"forwards": 2 * sum(self.samples(step) for step in range(steps)), "backwards": 0}

    @torch.no_grad()
    def step(self, params: Params, loss_fn: LossFn, step: int) -> MezoResult:
        """Do step number `step` (from 0). `loss_fn` gives the loss of one fixed batch wherever `params` stands."""
        plus, minus, grads = [], [], []
        for sample in range(self.samples(step)):
            z = Direction(self.seed, step, sample)
            with params.at(z, +self.config.eps, -self.config.eps):
                loss_plus, loss_minus = loss_fn().tolist()
            plus.append(loss_plus)
            minus.append(loss_minus)
            grads.append(float(np.float32((loss_plus - loss_minus) / (2 * self.config.eps))))
        result = MezoResult(sum(plus) / len(plus), sum(minus) / len(minus), grads, self.lr(step))
        if np.isfinite(grads).all():  # the loop stops a run whose loss is not finite; theta is left as it was
            self.apply(params, [(step, result.projected_grads, result.lr)])
        return result

    def recall(self, params: Params, records: list[Record]) -> None:
        """Take up what the steps of these records, all from the first on, left in the method's state: here nothing."""

    def apply(self, params: Params, records: list[Record]) -> None:
        """Do the updates of (step, projected_grads, lr) records: the one arithmetic of training and of replay."""
        terms, decays = [], []
        for record in records:
            estimate = self.estimate(record, -record[2])
            terms += estimate
            decays += [1.0 - record[2] * self.config.weight_decay, *[1.0] * (len(estimate) - 1)]
        params.update(terms, decays)

    def estimate(self, record: Record, scale: float) -> list[tuple[Direction, float]]:
        """The estimate of a step's gradient, times `scale`: (direction, coefficient) of each of its n_t terms."""
        step, grads, _ = record
        n = self.samples(step)
        return [(Direction(self.seed, step, sample), scale * g / n) for sample, g in enumerate(grads[:n])]
