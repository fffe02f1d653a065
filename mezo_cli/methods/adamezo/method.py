"""AdaMeZO (arXiv 2605.00650): Adam on the estimates of the last h steps, drawn again at every step.

    m = sum_j beta1^j G_(t-j),   v = sum_j beta2^j G_(t-j)^2,   j < h
    theta <- (1 - lr wd) theta - lr m / (sqrt(v) + adam_eps)

There is no factor 1 - beta and no correction of bias. The sums begin with the steps that there are; `window: 1` moves
every element by lr, against the sign of G. Defaults: h (`window`) 10, beta1 0.7, beta2 0.9, adam_eps 1e-5, those of the
command in the published code's README. That code takes h + 1 steps of MeZO first, and then has a factor of 100 in lr,
which the paper does not have. The state is the last h - 1 records: nothing is stored.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.update import BlockUpdate, Scratch, Terms
from mezo_cli.perturb.noise import to_float32

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.noise.spans import Span
    from mezo_cli.perturb.params import Params


class RedrawnAdam(BlockUpdate):
    """theta <- (1 - lr wd) theta - lr m / (sqrt(v) + adam_eps), of moments that are drawn again."""

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        self._recent: deque[Terms] = deque(maxlen=estimator.config.window)
        self.draws *= estimator.config.window
        self._z, self._square, self._v = Scratch(), Scratch(), Scratch()

    def plan(self, params: "Params", record: StepRecord) -> "Callable[[Span], Tensor]":
        """Return what computes lr m / (sqrt(v) + adam_eps) of a span."""
        self._recent.append(self.estimator.estimate(record, 1.0))
        return partial(self._draw_again, params, list(self._recent), to_float32(record[2]))

    def _draw_again(self, params: "Params", recent: list[Terms], rate: float, span: "Span") -> "Tensor":
        config = self.estimator.config
        beta1, beta2 = to_float32(config.beta1), to_float32(config.beta2)
        m, v = self.step.view(span).zero_(), self._v.view(span).zero_()
        z, square = self._z.view(span), self._square.view(span)
        for terms in recent:
            params.noise.update_(span, z.zero_(), terms, [1.0] * len(terms))
            m.mul_(beta1).add_(z)
            v.mul_(beta2).add_(square.copy_(z).mul_(z))
        return m.div_(v.sqrt_().add_(config.adam_eps)).mul_(rate)


class AdaMezo(Mezo):
    """SPSA, and Adam over a few steps that are drawn again."""

    update_class = RedrawnAdam
