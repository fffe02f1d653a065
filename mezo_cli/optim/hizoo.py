"""HiZOO (Zhao et al. 2024, arXiv 2402.15173, Algorithm 1): MeZO divided by the root of the Hessian's diagonal.

    g = (L+ - L-) / (2 eps),   k = |L+ + L- - 2 L(theta)| / (2 eps^2),   L+- = L(theta +- eps z / sqrt(H))
    H <- (1 - alpha) H + alpha k H z^2,   theta <- theta - lr (g z / sqrt(H) + wd theta)

H is 1 at first; the probe has H of the step before, the update has the new one. With n samples, g z and k z^2 are means
over them. alpha: 1e-6, that of the authors' RoBERTa runs; lr 1e-6, eps 1e-3. (Code that they published in 2024
multiplied by sqrt(H), in the probe and in the update: the reverse of the paper, and not repeated here.)

A step costs 2 n + 1 forwards. The state is H - 1, a float32 per parameter, in which increments of 1e-8 still count. It
is stored in the checkpoint `last`; elsewhere it is rebuilt from all steps before, with a draw of z each. The trajectory
holds the g of a step and then its k: 20 bytes per step of one sample. `alpha: 0` is MeZO, with one forward more.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from mezo_cli.config.optimizers import HizooConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.base import LossFn, to_float32
from mezo_cli.optim.mezo import MezoResult, losses_at
from mezo_cli.optim.mezo_momentum import Update, WithMoment
from mezo_cli.optim.moments import Moment, Scratch
from mezo_cli.perturb.noise import Direction

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.forward import PerturbedForward
    from mezo_cli.perturb.noise.spans import Span
    from mezo_cli.perturb.params import Params


@dataclass(frozen=True)
class HizooResult(MezoResult):
    """The scalars of one step.

    Attributes:
        loss_theta: of the weights themselves.
        curvatures: k of each sample, rounded to float32 as they are stored.
    """

    loss_theta: float
    curvatures: list[float]

    @property
    def recorded(self) -> list[float]:
        """The projected gradients, and then the curvatures."""
        return [*self.projected_grads, *self.curvatures]

    def scalars(self) -> dict[str, float]:
        """Return the fields of the step's line in metrics.jsonl."""
        values, curvature = super().scalars(), sum(self.curvatures) / len(self.curvatures)
        lr = values.pop("lr")
        return {**values, "loss_theta": self.loss_theta, "curvature": curvature, "lr": lr}


@dataclass(frozen=True)
class CurvedUpdate(Update):
    """The update of one step; `curvatures` are its k, one per term."""

    curvatures: list[float] = field(default_factory=list)

    @property
    def moves(self) -> bool:
        """Whether a scalar of the step is not 0, as records say it."""
        return super().moves or any(self.curvatures)


class Hizoo(WithMoment):
    """HiZOO with the diagonal. Weights and H follow from (seed, step, g, k, lr) of every step."""

    config: HizooConfig
    moments: ClassVar[tuple[str, ...]] = ("_excess",)

    def __init__(self, config: HizooConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps, 0.0, None)
        self._excess = Moment()  # H - 1
        self._z, self._curvature, self._root = Scratch(), Scratch(), Scratch()

    def samples(self, step: int) -> int:
        """Return the number of scalars that step `step` records."""
        return 2 * self.shown(step)

    def shown(self, step: int) -> int:
        """Return n_t: so many of them are g."""
        return super().samples(step)

    def step(self, forward: "PerturbedForward", loss_fn: LossFn, step: int) -> HizooResult:
        """Take step number `step` (from 0). `loss_fn` returns the loss of one fixed batch through `forward`."""
        eps, points = self.config.eps, [Direction(self.seed, step, i) for i in range(self.shown(step))]
        with self._probing(forward) as probed:
            *pairs, (at_theta, _) = losses_at(forward, loss_fn, [*points, None], probed)
        plus, minus = zip(*pairs, strict=True)
        grads = [to_float32((p - m) / (2 * eps)) for p, m in pairs]
        curvatures = [to_float32(abs(p + m - 2 * at_theta) / (2 * eps * eps)) for p, m in pairs]
        n, lr = len(points), self.lr(step)
        result = HizooResult(sum(plus) / n, sum(minus) / n, grads, lr, at_theta, curvatures)
        if all(map(math.isfinite, result.recorded)):  # else theta is left as it was, and the loop ends the run
            self.apply_updates(forward.params, [(step, result.recorded, lr)])
        return result

    @contextmanager
    def _probing(self, forward: "PerturbedForward") -> Iterator[float]:
        """Let forwards see z / sqrt(H), and yield the eps to perturb by."""
        from mezo_cli.perturb.noise.divided import DividedNoise

        params, noise = forward.params, forward.params.noise
        try:
            params.noise = cast(Any, DividedNoise(params, self._root_of))  # forwards call only its methods
            yield self.config.eps
        finally:
            params.noise = noise

    def _root_of(self, span: "Span") -> "Tensor":
        """Return sqrt(H) of a span; the one before is no longer valid."""
        import torch

        root = self._root.view(span)
        return torch.add(self._excess.view(span), 1.0, out=root).sqrt_()

    def gradients(self, record: StepRecord) -> list[float]:
        """Return g of each of a step's directions, clipped."""
        return self.clip.clip(record[0], record[1][: self.shown(record[0])])

    def plan_update(self, record: StepRecord) -> CurvedUpdate:
        """Return the update of a step. Its terms have no lr."""
        step, scalars, lr = record
        curvatures = scalars[self.shown(step) : self.samples(step)]
        return CurvedUpdate(self.estimate(record, 1.0), lr, 1.0 - lr * self.config.weight_decay, curvatures=curvatures)

    def step_params(self, params: "Params", updates: list[Any], write: bool) -> None:
        """Update H by each update in order and, with `write`, theta."""
        for span in params.blocks():
            theta = params.load(span)
            for update in updates:
                step = self._step_of(params, span, update)
                if write:
                    params.decay_and_subtract(theta, step, update.decay)
                    params.round_(span, theta, update.terms[0][0])
            if write:
                params.store(span, theta)

    def _step_of(self, params: "Params", span: "Span", update: CurvedUpdate) -> "Tensor":
        """Update H of a span, and return lr g z / sqrt(H)."""
        import torch

        step, z, k = self._step.view(span).zero_(), self._z.view(span), self._curvature.view(span).zero_()
        for (direction, g), curvature in zip(update.terms, update.curvatures, strict=True):
            params.noise.update_(span, z.zero_(), [(direction, 1.0)], [1.0])
            step.add_(z * to_float32(g * update.rate))
            k.add_(z.square_().mul_(to_float32(curvature / len(update.terms))))
        excess = self._excess.view(span)
        # (1 - alpha) H + alpha k z^2 H = H + alpha (k z^2 - 1) H
        excess.add_(k.sub_(1.0).mul_(torch.add(excess, 1.0, out=z)).mul_(to_float32(self.config.alpha)))
        return step.div_(self._root_of(span))
