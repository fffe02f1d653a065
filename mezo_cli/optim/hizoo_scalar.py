"""HiZOO with one number in place of the Hessian's diagonal: what is left of it if z^2 is 1 in the estimate.

    h <- (1 - alpha) h + alpha k h,   theta <- theta - lr (g z / sqrt(h) + wd theta)

g and k are those of hizoo.py, probed at theta +- eps z / sqrt(h). With one probe per step, the expected k z_i^2 is
(tr A + 2 A_ii) / 2 for a Hessian A: with many parameters the trace hides the diagonal, and this tells how much of
HiZOO the trace alone is. No paper has it. alpha 1e-6, lr 1e-6, eps 1e-3 as HiZOO. A step costs 2 n + 1 forwards; the
state is one number, rebuilt from the trajectory, which has 20 bytes per step of one sample.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.base import to_float32
from mezo_cli.optim.hizoo import CurvedUpdate, Hizoo, HizooConfig

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.forward import PerturbedForward
    from mezo_cli.perturb.noise.spans import Span
    from mezo_cli.perturb.params import Params


class HizooScalar(Hizoo):
    """HiZOO with a scalar. The weights and h follow from (seed, step, g, k, lr) of every step."""

    moments = ()
    scalars = ("_next", "_h")

    def __init__(self, config: HizooConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        self._h = 1.0

    @contextmanager
    def _probing(self, forward: "PerturbedForward") -> Iterator[float]:
        """Yield the eps to perturb by: z itself stays."""
        yield self.config.eps / math.sqrt(self._h)

    def plan_update(self, record: StepRecord) -> CurvedUpdate:
        """Return the update of a step, after that of h."""
        update = super().plan_update(record)
        mean = sum(update.curvatures) / len(update.curvatures)
        self._h += self.config.alpha * (mean - 1.0) * self._h
        rate = update.rate / math.sqrt(self._h)
        return CurvedUpdate(update.terms, rate, update.decay, curvatures=update.curvatures)

    def step_params(self, params: "Params", updates: list[Any], write: bool) -> None:
        """With `write`, update theta by each update in order."""
        if write:
            super().step_params(params, updates, write)

    def _step_of(self, params: "Params", span: "Span", update: CurvedUpdate) -> "Tensor":
        """Return lr g z / sqrt(h) of a span."""
        step = self._step.view(span).zero_()
        terms = [(direction, to_float32(g * update.rate)) for direction, g in update.terms]
        params.noise.update_(span, step, terms, [1.0] * len(terms))
        return step
