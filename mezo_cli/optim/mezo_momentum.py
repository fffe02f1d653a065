"""MeZO with momentum: heavy ball on MeZO's gradient estimate (paper, arXiv 2305.17333, section 2.2 and its appendix).

    m_t = momentum m_(t-1) + g_t z_t,   theta <- (1 - lr wd) theta - lr m_t        (g z is the mean over n samples)

This is torch.optim.SGD with g z as the gradient, except for the weight decay: it acts on theta, not on m, so that m
follows from the scalars of the trajectory alone. It is computed, and deferred by steps without a gradient, as that of
`mezo` (see mezo.py): also where m moves theta in such a step.

`window: null` keeps m, a buffer of theta's size, and draws z once per step and sample, as MeZO does. The checkpoint
`last` stores m. Where it is not at hand, m is rebuilt from all steps before: one draw of z each and no forward.
`window: W` keeps no buffer: every step draws the last W directions again and sums them block by block, so W draws per
step. m then lacks the steps before, momentum^W of it (docs/concepts/methods.md has a table). A resumed run needs the
last W - 1 records.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from mezo_cli.config.optimizers import MezoMomentumConfig, ZerothOrderConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.base import StoredState, to_float32
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.moments import Moment, Scratch
from mezo_cli.perturb.noise import Direction

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.params import Params


@dataclass(frozen=True)
class Update:
    """The update of one step: m <- beta m + terms, then theta <- decay theta - rate m.

    `decay` is the step's own, 1 - lr wd, until `WeightDecay.take` has taken it.
    """

    terms: list[tuple[Direction, float]]
    rate: float
    decay: float
    correction: float = 1.0  # of Adam's second moment, where it is a buffer

    @property
    def moves(self) -> bool:
        """Whether a projected gradient of the step is not 0."""
        return any(coefficient for _, coefficient in self.terms)


class WithMoment(StoredState, Mezo):
    """A method with a first moment of g z. `rebuild_state` and `apply_updates` need every step of a run once, in order.

    Args:
        config, seed, steps: as of every optimizer.
        decay: the factor of m per step.
        window: the steps that m sums; None for all.
    """

    moments: ClassVar[tuple[str, ...]] = ("_m",)  # attributes, each a `Moment`
    scalars: ClassVar[tuple[str, ...]] = ("_next",)  # attributes: numbers

    def __init__(self, config: ZerothOrderConfig, seed: int, steps: int, decay: float, window: int | None) -> None:
        super().__init__(config, seed, steps)
        self.beta, self.window = to_float32(decay), window
        self._next = 0  # the next step
        self._m, self._step = Moment(), Scratch()  # m is unused with a window
        self._recent: deque[Update] = deque(maxlen=(window or 1) - 1)  # the steps that a window still needs

    def plan_update(self, record: StepRecord) -> Update:
        """Return the update of a step. Steps must come in order, each once."""
        return Update(self.estimate(record, 1.0), record[2], 1.0 - record[2] * self.config.weight_decay)

    def rebuild_state(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild m, or the updates that a window needs, from all steps so far; theta stays."""
        for updates in self._plan_in_passes(records):
            if self.window is None:
                self.step_params(params, updates, write=False)
            self._recent.extend(updates)

    def apply_updates(self, params: "Params", records: list[StepRecord]) -> None:
        """Update m and theta by each record in order."""
        for planned in self._plan_in_passes(records):
            updates = [replace(update, decay=params.decay.take(update.decay, update.moves)) for update in planned]
            if self.window is None:
                self.step_params(params, updates, write=True)
            else:
                self._step_params_by_window(params, [*self._recent, *updates], len(updates))
            self._recent.extend(updates)

    def _plan_in_passes(self, records: list[StepRecord]) -> Iterator[list[Update]]:
        from mezo_cli.perturb.params import TERMS_PER_PASS

        # A pass applies some steps to one block of theta while it is in cache.
        steps = max(1, TERMS_PER_PASS // (self.config.samples * (self.window or 1)))
        for first in range(0, len(records), steps):
            some = records[first : first + steps]
            for step, _, _ in some:
                if step != self._next:
                    raise RuntimeError(f"momentum needs every step in order: got step {step}, expected {self._next}")
                self._next += 1
            yield [self.plan_update(record) for record in some]

    def step_params(self, params: "Params", updates: list[Update], write: bool) -> None:
        """Update m by each update in order and, with `write`, theta."""
        import torch

        for span in params.blocks():
            theta, m, step = params.load(span), self._m.view(span), self._step.view(span)
            for update in updates:
                decays = [self.beta, *[1.0] * (len(update.terms) - 1)]
                params.noise.update_(span, m, update.terms, decays)
                if write:
                    params.decay_and_subtract(theta, torch.mul(m, update.rate, out=step), update.decay)
                    params.round_(span, theta, update.terms[0][0])
            if write:
                params.store(span, theta)

    def _step_params_by_window(self, params: "Params", updates: list[Update], number: int) -> None:
        """Update theta by the last `number` updates; m of each is the sum over the last `window` updates up to it."""
        window, chains = self.window or 1, []
        for i in range(len(updates) - number, len(updates)):
            summed, weight, chain = updates[max(0, i + 1 - window) : i + 1], 1.0, []
            for past in reversed(summed):
                chain += [(direction, c * weight * updates[i].rate) for direction, c in past.terms]
                weight *= self.beta
            chains.append((chain[::-1], updates[i]))  # the smallest terms first
        for span in params.blocks():
            theta, step = params.load(span), self._step.view(span)
            for chain, update in chains:
                params.noise.update_(span, step.zero_(), chain, [1.0] * len(chain))
                params.decay_and_subtract(theta, step, update.decay)
                params.round_(span, theta, update.terms[0][0])
            params.store(span, theta)

    def share_moments(self, other: "WithMoment") -> None:
        """Keep the moments in the buffers of `other`, which updates other tensors of the same storage."""
        for moment in self.moments:
            setattr(self, moment, getattr(other, moment))

    def state_tensors(self) -> "dict[str, Tensor]":
        """Return moments, named `m:PARAMETER`, and `scalars`. With a window there are none."""
        import torch

        tensors = {
            f"{moment.strip('_')}:{name}": tensor
            for moment in self.moments
            for name, tensor in getattr(self, moment).tensors().items()
        }
        if tensors:
            if self.clip.past:
                tensors["clip"] = torch.tensor(self.clip.past, dtype=torch.float64)
            tensors["scalars"] = torch.tensor([getattr(self, name) for name in self.scalars], dtype=torch.float64)
        return tensors

    def load_tensors(self, tensors: "dict[str, Tensor]", step: int) -> None:
        """Take over what `state_tensors` returned after `step` steps."""
        values = tensors["scalars"].tolist() if "scalars" in tensors else []
        if len(values) != len(self.scalars) or values[0] != step:
            raise ValueError(f"it does not hold the state of {self.config.name} at step {step}")
        for name, value in zip(self.scalars, values, strict=True):
            setattr(self, name, type(getattr(self, name))(value))
        self.clip.restore(tensors["clip"].tolist() if "clip" in tensors else [])
        for moment in self.moments:
            start = f"{moment.strip('_')}:"
            averages = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
            getattr(self, moment).load(averages)


class MezoMomentum(WithMoment):
    """MeZO with momentum."""

    config: MezoMomentumConfig

    def __init__(self, config: MezoMomentumConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps, config.momentum, config.window)
