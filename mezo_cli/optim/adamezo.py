"""AdaMeZO (arXiv 2605.00650): Adam on MeZO's estimates G = g z of the last h steps, drawn again at every step.

    m = sum_j beta1^j G_(t-j),   v = sum_j beta2^j G_(t-j)^2,   j < h
    theta <- (1 - lr wd) theta - lr m / (sqrt(v) + adam_eps)

There is no factor 1 - beta and no correction of bias. The sums begin with the steps that there are; `window: 1` moves
every element by lr, against the sign of G. G is the mean over n samples. Defaults: h (`window`) 10, beta1 0.7, beta2
0.9, adam_eps 1e-5, those of the command in the published code's README. That code takes h + 1 steps of MeZO first, and
then has a factor of 100 in lr, which the paper does not have.

A step costs two forwards per sample, and its update h draws of z per sample. The state is the last h - 1 records:
nothing is stored. The trajectory is that of MeZO.
"""

from collections import deque
from typing import TYPE_CHECKING

from mezo_cli.config.optimizers import AdaMezoConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.base import to_float32
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.moments import Scratch
from mezo_cli.perturb.noise import Direction

if TYPE_CHECKING:
    from mezo_cli.perturb.params import Params

Terms = list[tuple[Direction, float]]  # of G of a step


class AdaMezo(Mezo):
    """AdaMeZO. The weights follow from (seed, step, g, lr) of every step."""

    config: AdaMezoConfig

    def __init__(self, config: AdaMezoConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        self._recent: deque[Terms] = deque(maxlen=config.window)
        self._z, self._square, self._m, self._v = Scratch(), Scratch(), Scratch(), Scratch()

    def rebuild_state(self, params: "Params", records: list[StepRecord]) -> None:
        """Keep the estimates that the next steps draw again."""
        for record in records:
            self._recent.append(self.estimate(record, 1.0))

    def apply_updates(self, params: "Params", records: list[StepRecord]) -> None:
        """Update theta by each record in order."""
        for record in records:
            terms, lr = self.estimate(record, 1.0), record[2]
            self._recent.append(terms)
            moves = lr != 0 and any(record[1])
            decay = params.decay.take(1.0 - lr * self.config.weight_decay, moves)
            self._update(params, record, decay)

    def _update(self, params: "Params", record: StepRecord, decay: float) -> None:
        step, _, lr = record
        config, first = self.config, Direction(self.seed, step)
        rate, beta1, beta2 = to_float32(lr), to_float32(config.beta1), to_float32(config.beta2)
        for span in params.blocks():
            theta, z = params.load(span), self._z.view(span)
            m, v, square = self._m.view(span).zero_(), self._v.view(span).zero_(), self._square.view(span)
            for terms in self._recent:
                params.noise.update_(span, z.zero_(), terms, [1.0] * len(terms))
                m.mul_(beta1).add_(z)
                v.mul_(beta2).add_(square.copy_(z).mul_(z))
            m.div_(v.sqrt_().add_(config.adam_eps))
            params.decay_and_subtract(theta, m.mul_(rate), decay)
            params.round_(span, theta, first)
            params.store(span, theta)
