"""HiZOO (Zhao et al. 2024, arXiv 2402.15173, Algorithm 1): MeZO divided by the root of the Hessian's diagonal.

    g = (L+ - L-) / (2 eps),   k = |L+ + L- - 2 L(theta)| / (2 eps^2),   L+- = L(theta +- eps z / sqrt(H))
    H <- (1 - alpha) H + alpha k H z^2,   theta <- theta - lr (g z / sqrt(H) + wd theta)

H is 1 at first; the probe has H of the step before, the update has the new one. With n samples, g z and k z^2 are means
over them. alpha: 1e-6, that of the authors' RoBERTa runs; lr 1e-6, eps 1e-3. (Code that they published in 2024
multiplied by sqrt(H), in the probe and in the update: the reverse of the paper, and not repeated here.)

A step costs 2 n + 1 forwards. The state is H - 1, a float32 per parameter, in which increments of 1e-8 still count. It
is stored in the checkpoint `last`; elsewhere it is rebuilt from all steps before, with a draw of z each. The trajectory
holds the g of a step and then its k: 20 bytes per step of one sample. `alpha: 0` is MeZO, with one forward more.

`optimizer=hizoo_scalar` has one number h in place of the diagonal: what is left of it if z^2 is 1 in the estimate.

    h <- (1 - alpha) h + alpha k h,   theta <- theta - lr (g z / sqrt(h) + wd theta)

With one probe per step, the expected k z_i^2 is (tr A + 2 A_ii) / 2 for a Hessian A: with many parameters the trace
hides the diagonal, and this tells how much of HiZOO the trace alone is. No paper has it. h is rebuilt from the
trajectory.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mezo_cli.config.schema import StepRecord
from mezo_cli.methods.hizoo.settings import HizooConfig
from mezo_cli.optim.base import LossFn
from mezo_cli.optim.mezo import Mezo, MezoResult, losses_at
from mezo_cli.optim.update import BlockUpdate, Moment, Scratch, Terms
from mezo_cli.perturb.noise import Direction, to_float32

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mezo_cli.perturb.forward import PerturbedForward
    from mezo_cli.perturb.noise.spans import Span
    from mezo_cli.perturb.params import Params


class Preconditioned(BlockUpdate):
    """SGD along g z / sqrt(H); H, which the forwards see too, follows from the curvatures."""

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        self.moments["excess"] = Moment()  # H - 1
        self._z, self._curvature, self._root = Scratch(), Scratch(), Scratch()

    @contextmanager
    def probing(self, forward: "PerturbedForward") -> Iterator[float]:
        """Let forwards see z / sqrt(H), and yield the eps to perturb by."""
        from mezo_cli.methods.hizoo.noise import DividedNoise
        from mezo_cli.perturb.functional import swapped

        params = forward.params
        with swapped("noise", {params: DividedNoise(params.noise, params.span_of, self._root_of)}):
            yield self.estimator.config.eps

    def _root_of(self, span: "Span", shape: "torch.Size | None" = None, rows: "Tensor | None" = None) -> "Tensor":
        """Return sqrt(H) of a span, or of some rows of its tensor; that of the span before is no longer valid."""
        import torch

        if shape is not None:
            excess = self.moments["excess"].view(span)[: shape.numel()].view(shape)
            return excess[rows].add_(1.0).sqrt_()
        return torch.add(self.moments["excess"].view(span), 1.0, out=self._root.view(span)).sqrt_()

    def plan(self, params: "Params", record: StepRecord) -> "Callable[[Span], Tensor]":
        """Return what updates H of a span, and computes lr g z / sqrt(H)."""
        terms, curvatures = self.estimator.estimate(record, 1.0), self.estimator.curvatures(record)
        return partial(self._divide, params, terms, curvatures, record[2])

    def _divide(self, params: "Params", terms: Terms, curvatures: list[float], lr: float, span: "Span") -> "Tensor":
        import torch

        step, z, k = self.step.view(span).zero_(), self._z.view(span), self._curvature.view(span).zero_()
        for (direction, g), curvature in zip(terms, curvatures, strict=True):
            params.noise.update_(span, z.zero_(), [(direction, 1.0)], [1.0])
            step.add_(z * to_float32(g * lr))
            k.add_(z.square_().mul_(to_float32(curvature / len(terms))))
        excess = self.moments["excess"].view(span)
        # (1 - alpha) H + alpha k z^2 H = H + alpha (k z^2 - 1) H
        alpha = to_float32(self.estimator.config.alpha)
        excess.add_(k.sub_(1.0).mul_(torch.add(excess, 1.0, out=z)).mul_(alpha))
        return step.div_(self._root_of(span))


class PreconditionedByScalar(BlockUpdate):
    """SGD along g z / sqrt(h), one number h."""

    scalars = ("next_step", "h")

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        self.h = 1.0

    @contextmanager
    def probing(self, forward: "PerturbedForward") -> Iterator[float]:
        """Yield the eps to perturb by: z itself stays."""
        yield self.estimator.config.eps / math.sqrt(self.h)

    def plan(self, params: "Params", record: StepRecord) -> "Callable[[Span], Tensor]":
        """Update h, and return what computes lr g z / sqrt(h) of a span."""
        curvatures = self.estimator.curvatures(record)
        self.h += self.estimator.config.alpha * (sum(curvatures) / len(curvatures) - 1.0) * self.h
        rate = record[2] / math.sqrt(self.h)
        terms = [(direction, to_float32(g * rate)) for direction, g in self.estimator.estimate(record, 1.0)]
        return partial(self.sum_of, params, terms)


class Hizoo(Mezo):
    """g and the curvature k along each z, and SGD divided by sqrt(H)."""

    config: HizooConfig
    update: Preconditioned | PreconditionedByScalar
    update_class: ClassVar[type[Preconditioned | PreconditionedByScalar]] = Preconditioned

    def curvatures(self, record: StepRecord) -> list[float]:
        """Return k of each of a step's directions."""
        n = self.samples(record[0])
        return record[1][n : 2 * n]

    def step(self, forward: "PerturbedForward", loss_fn: LossFn, step: int) -> MezoResult:
        """Take step number `step` (from 0). `loss_fn` returns the loss of one fixed batch through `forward`."""
        eps, points = self.config.eps, [Direction(self.seed, step, i) for i in range(self.samples(step))]
        with self.update.probing(forward) as probed:
            *pairs, (at_theta, _) = losses_at(forward, loss_fn, [*points, None], probed)
        plus, minus = zip(*pairs, strict=True)
        result = MezoResult.of(plus, minus, [(p - m) / (2 * eps) for p, m in pairs], self.lr(step))
        k = [to_float32(abs(p + m - 2 * at_theta) / (2 * eps * eps)) for p, m in pairs]
        others = {**result.others, "loss_theta": at_theta, "curvature": sum(k) / len(k)}
        result = replace(result, recorded=[*result.recorded, *k], others=others)
        if all(map(math.isfinite, result.recorded)):  # else theta is left as it was, and the loop ends the run
            self.apply_updates(forward.params, [(step, result.recorded, result.lr)])
        return result


class HizooScalar(Hizoo):
    """The same, and SGD divided by one number."""

    update_class = PreconditionedByScalar
