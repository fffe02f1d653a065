"""The weight decay of theta: in which arithmetic it is applied, and at which step.

It is theta - d theta + c z, d = 1 - decay, computed in float64 and rounded once. theta - d theta alone, rounded to
float32, would be theta again for d below 3e-8, and MeZO's lr wd often is. c z is larger than what is rounded away, and
differs from step to step: in the mean over the steps nothing is lost. A step whose projected gradients are all 0 has no
c z, so its decay is deferred: the next step that has some applies decay_1 decay_2 ... of all steps since the last one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from mezo_cli.config.schema import StepRecord
from mezo_cli.perturb.noise import Direction

Term = tuple[Direction, float]


class WeightDecay:
    """What steps without a gradient have deferred. It follows from the records of the steps, in order.

    Attributes:
        deferred: the product of the deferred decays.
    """

    def __init__(self) -> None:
        self.deferred = 1.0

    def take(self, decay: float, moves: bool) -> float:
        """Return the decay to apply in the next step: with what the steps before deferred, or 1 if it is deferred, too.

        Args:
            decay: the step's own, e.g. 1 - lr weight_decay.
            moves: whether a projected gradient of the step is not 0.
        """
        decay *= self.deferred
        self.deferred = 1.0 if moves else decay
        return decay if moves else 1.0

    def take_each(self, terms: Sequence[Term], decays: Sequence[float]) -> Sequence[float]:
        """Return the decays to apply with these terms: those of a step all with its first term that is not 0."""
        if self.deferred == 1.0 and all(decay == 1.0 for decay in decays):
            return decays
        due: list[float] = []
        for of_step, with_decays in split_steps(terms, decays):
            moving = [len(due) + i for i, (_, coefficient) in enumerate(of_step) if coefficient]
            decay = self.take(math.prod(with_decays), bool(moving))
            due += [1.0] * len(of_step)
            if moving:
                due[moving[0]] = decay
        return due

    def rebuild(self, records: Iterable[StepRecord], weight_decay: float) -> None:
        """Defer what these steps deferred: all steps so far, or the last ones from one with a gradient on.

        Args:
            records: (step, projected gradients, lr), in order.
            weight_decay: the decay of a step is 1 - lr weight_decay.
        """
        self.deferred = 1.0
        for _, grads, lr in records:
            self.take(1.0 - lr * weight_decay, moves=lr != 0 and any(grads))


def split_steps(terms: Sequence[Term], decays: Sequence[float]) -> Iterator[tuple[list[Term], list[float]]]:
    """Yield the terms of each step, and their decays."""
    for _, of_step in groupby(zip(terms, decays, strict=True), lambda pair: pair[0][0][:2]):
        pairs = list(of_step)
        yield [term for term, _ in pairs], [decay for _, decay in pairs]
