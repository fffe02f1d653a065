"""MeZO, the paper's Algorithm 1 (Malladi et al. 2023, arXiv 2305.17333, section 2), and n-SPSA (its section 2.1).

    z ~ N(0, I),   g = (L(theta + eps z) - L(theta - eps z)) / (2 eps),   theta <- theta - lr (g z + wd theta)

n-SPSA averages g_i z_i over n directions drawn at the same theta (section 2.1). With `sample_schedule: linear` step t
of T draws n_t = 1 + floor(n t / T) directions, from 1 to n in equal parts (the published linear schedule is max(1,
floor(n t / T)), which ends at n - 1). lr is not scaled with n_t.

Weight decay is applied once per step, to every tensor: theta - (lr wd) theta + c z is computed in float64 and rounded
once. With theta in float32 and lr wd below 3e-8, theta - (lr wd) theta alone would round to theta; c z is what carries
it, in the mean over the steps. A step whose g are all 0 (an accuracy as loss, equal scores) has no c z, so it changes
nothing and defers its decay. The next step with a g that is not 0 applies the decay of all steps since the last one,

    theta <- theta - D theta + c z,   D = 1 - prod_i (1 - lr_i wd)

D is a function of the records alone (perturb/decay.py). What is deferred when a run ends is not applied; if the run is
resumed with more steps, their first g that is not 0 applies it.

`clip_g` bounds each |g| (clip.py). There is no other state. A step costs 2 n_t forwards with perturbed weights, and one
pass over theta that draws z n_t times.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mezo_cli.config.optimizers import PerturbationConfig, ZerothOrderConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.distributed.ranks import split_sizes
from mezo_cli.optim.base import LossFn, ReplayableOptimizer, learning_rate, to_float32
from mezo_cli.optim.clip import Clip
from mezo_cli.perturb.noise import Direction

if TYPE_CHECKING:  # torch is imported when a step is taken, not when settings are read
    from mezo_cli.perturb.forward import PerturbedForward
    from mezo_cli.perturb.params import Params


@dataclass(frozen=True)
class MezoResult:
    """The scalars of one step: its mean losses, and those from which it is replayed."""

    loss_plus: float
    loss_minus: float
    projected_grads: list[float]  # one per sample, rounded to float32 as they are stored
    lr: float  # rounded likewise

    @property
    def recorded(self) -> list[float]:
        """The projected gradients."""
        return self.projected_grads

    @property
    def loss(self) -> float:
        """Mean of both losses."""
        return (self.loss_plus + self.loss_minus) / 2

    @property
    def projected_grad(self) -> float:
        """Mean over the samples."""
        return sum(self.projected_grads) / len(self.projected_grads)

    def scalars(self) -> dict[str, float]:
        """Return the fields of the step's line in metrics.jsonl."""
        names = ("loss", "loss_plus", "loss_minus", "projected_grad", "lr")
        return {name: getattr(self, name) for name in names}


def spsa(forward: "PerturbedForward", loss_fn: LossFn, z: Direction, eps: float) -> tuple[float, float, float]:
    """Return L(theta + eps z), L(theta - eps z) and the projected gradient along z (paper, Definition 1)."""
    return spsa_per_direction(forward, loss_fn, [z], eps)[0]


def spsa_per_direction(
    forward: "PerturbedForward", loss_fn: LossFn, directions: list[Direction], eps: float
) -> list[tuple[float, float, float]]:
    """Return what `spsa` does for each direction.

    `forward` draws z for each module's weights as the module runs; theta is not written. The losses of all directions
    are read at once: this is where the host waits for the device, once per step. Where ranks share the directions, each
    computes the losses of its own.
    """
    pairs = losses_at(forward, loss_fn, directions, eps)
    return [(plus, minus, (plus - minus) / (2 * eps)) for plus, minus in pairs]


def losses_at(
    forward: "PerturbedForward", loss_fn: LossFn, points: Sequence[Direction | None], eps: float
) -> list[list[float]]:
    """Return [L(theta + eps z), L(theta - eps z)] of each direction; for None twice L(theta)."""
    import torch

    ranks = forward.ranks
    losses = forward.losses_of(ranks.own(points), eps, loss_fn)
    pairs = torch.stack([loss.expand(2) for loss in losses]) if losses else torch.empty(0, 2, dtype=torch.float64)
    pairs = ranks.gather_parts(pairs.cpu().double(), split_sizes(len(points), ranks.size), "step")
    values: list[list[float]] = pairs.tolist()
    return values


class DirectionalOptimizer(ReplayableOptimizer):
    """An optimizer whose update is a sum of c z over the directions of the step; `estimate` returns its terms."""

    config: PerturbationConfig

    def __init__(self, config: PerturbationConfig, seed: int, steps: int) -> None:
        self.config, self.seed, self.steps = config, seed, steps

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step` (from 0)."""
        return learning_rate(self.config, step, self.steps)

    def rebuild_state(self, params: "Params", records: list[StepRecord]) -> None:
        """Do nothing: there is no state but the decay that `params` defers."""

    def apply_updates(self, params: "Params", records: list[StepRecord]) -> None:
        """Update theta by each record in order."""
        terms, decays = [], []
        for record in records:
            estimate = self.estimate(record, -record[2])
            terms += estimate
            decays += [1.0 - record[2] * self.config.weight_decay, *[1.0] * (len(estimate) - 1)]
        params.update(terms, decays)

    @abstractmethod
    def estimate(self, record: StepRecord, scale: float) -> list[tuple[Direction, float]]:
        """Return `scale` times a step's estimate of the gradient: (direction, coefficient) of each of its terms."""


class Mezo(DirectionalOptimizer):
    """The zeroth-order step. The weights follow from (seed, step, g, lr) of every step."""

    config: ZerothOrderConfig

    def __init__(self, config: ZerothOrderConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        self.clip = Clip(config.clip_g, config.clip_window)

    def samples(self, step: int) -> int:
        """Return n_t, the number of directions that step `step` draws."""
        return self.config.samples_at(step, self.steps)

    def step(self, forward: "PerturbedForward", loss_fn: LossFn, step: int) -> MezoResult:
        """Take step number `step` (from 0). `loss_fn` returns the loss of one fixed batch through `forward`."""
        directions = [Direction(self.seed, step, sample) for sample in range(self.samples(step))]
        plus, minus, grads = zip(*spsa_per_direction(forward, loss_fn, directions, self.config.eps), strict=True)
        result = MezoResult(
            sum(plus) / len(plus), sum(minus) / len(minus), [to_float32(grad) for grad in grads], self.lr(step)
        )
        if all(map(math.isfinite, result.projected_grads)):  # else theta is left as it was, and the loop ends the run
            self.apply_updates(forward.params, [(step, result.projected_grads, result.lr)])
        return result

    def rebuild_state(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild what a running quantile of |g| is taken of."""
        for record in records:
            self.gradients(record)

    def gradients(self, record: StepRecord) -> list[float]:
        """Return g of each of a step's n_t directions, clipped. Steps must come in order; the last may be repeated."""
        step, grads, _ = record
        return self.clip.clip(step, grads[: self.samples(step)])

    def estimate(self, record: StepRecord, scale: float) -> list[tuple[Direction, float]]:
        """Return `scale` times (1 / n) sum_i g_i z_i of a step: (direction, coefficient) of each of its n_t terms."""
        grads = self.gradients(record)
        return [(Direction(self.seed, record[0], i), scale * g / len(grads)) for i, g in enumerate(grads)]
