"""MeZO, the paper's Algorithm 1 (Malladi et al. 2023, arXiv 2305.17333, section 2), and n-SPSA (its section 2.1).

    z ~ N(0, I),   g = (L(theta + eps z) - L(theta - eps z)) / (2 eps),   theta <- theta - lr (g z + wd theta)

With n samples the step averages g_i z_i over n directions drawn at the same theta; weight decay is applied once.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mezo_cli.noise import Direction
from mezo_cli.optim.step import LossFn, learning_rate
from mezo_cli.params import Params
from mezo_cli.schema import OptimizerConfig


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

    def passes(self, steps: int) -> dict[str, int]:
        """Two forwards a sample, no backward."""
        return {"forwards": 2 * self.config.samples * steps, "backwards": 0}

    @torch.no_grad()
    def step(self, params: Params, loss_fn: LossFn, step: int) -> MezoResult:
        """Do step number `step` (from 0). `loss_fn` gives the loss of one fixed batch wherever `params` stands."""
        plus, minus, grads = [], [], []
        for sample in range(self.config.samples):
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

    def apply(self, params: Params, records: list[tuple[int, list[float], float]]) -> None:
        """Do the updates of (step, projected_grads, lr) records: the one arithmetic of training and of replay."""
        terms, decays = [], []
        for step, grads, lr in records:
            for sample, g in enumerate(grads):
                terms.append((Direction(self.seed, step, sample), -lr * g / len(grads)))
                decays.append(1.0 - lr * self.config.weight_decay if sample == 0 else 1.0)
        params.update(terms, decays)
