"""MeZO with momentum: the heavy ball on MeZO's estimate (paper, arXiv 2305.17333, section 2.2 and its appendix).

    m_t = momentum m_(t-1) + g_t z_t,   theta <- (1 - lr wd) theta - lr m_t        (g z is the mean over n samples)

as torch.optim.SGD has it, fed with g z for a gradient, but for the weight decay: it acts on theta, not on m, so that m
follows from the scalars of the trajectory alone. No state is ever written to disk: a resumed run rebuilds it.

`window: null` keeps m, a buffer of theta's size: one draw of z a step as without momentum. A resumed or replayed run
rebuilds it from all steps before, one draw of z each, without a forward.
`window: W` keeps nothing: each step draws the last W directions again and adds them up part by part of theta, W draws
of z a step. m is then short of the steps before, by momentum^W of it (docs/methods.md has a table); a resumed run
needs the last W - 1 records.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mezo_cli.noise import Direction
from mezo_cli.optim.mezo import Mezo, Record
from mezo_cli.params import Params
from mezo_cli.schema import OptimizerConfig

AT_ONCE = 32  # steps of a replay that are done to a part of theta while it is in cache


@dataclass(frozen=True)
class Update:
    """One step's: m <- beta m + terms, then theta <- decay theta - rate m."""

    terms: list[tuple[Direction, float]]
    rate: float
    decay: float


class MezoMomentum(Mezo):
    """The heavy ball. `recall` and `apply` see every step of a run once, in order."""

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        self.beta = float(np.float32(self.decay_of_moment()))
        self._next = 0  # the step that comes next
        self._moment: dict[str, Tensor] = {}  # m, flat, where there is no window
        self._recent: deque[Update] = deque(maxlen=(config.window or 1) - 1)  # the steps that a window still looks at

    def decay_of_moment(self) -> float:
        """What the moment is multiplied by at each step."""
        return self.config.momentum

    def plan(self, record: Record) -> Update:
        """Say what a step does. Called once a step, in order."""
        return Update(self.estimate(record, 1.0), record[2], 1.0 - record[2] * self.config.weight_decay)

    def recall(self, params: Params, records: list[Record]) -> None:
        """Rebuild what the steps of these records, all from the first on, left in the method's state."""
        for updates in self._planned(records):
            if self.config.window is None:
                self.move(params, updates, write=False)
            self._recent.extend(updates)

    def apply(self, params: Params, records: list[Record]) -> None:
        """Do the updates of (step, projected_grads, lr) records: the one arithmetic of training and of replay."""
        for updates in self._planned(records):
            if self.config.window is None:
                self.move(params, updates, write=True)
            else:
                self._move_by_window(params, [*self._recent, *updates], len(updates))
            self._recent.extend(updates)

    def _planned(self, records: list[Record]) -> Iterator[list[Update]]:
        for first in range(0, len(records), AT_ONCE):
            some = records[first : first + AT_ONCE]
            assert [step for step, _, _ in some] == list(range(self._next, self._next + len(some))), "a step is missing"
            self._next += len(some)
            yield [self.plan(record) for record in some]

    def move(self, params: Params, updates: list[Update], write: bool) -> None:
        """Do updates to m and, where `write`, to theta."""
        for name, start, theta in params.blocks():
            m = self.buffer(self._moment, params, name)[start : start + len(theta)]
            step = torch.empty_like(theta)
            for update in updates:
                decays = [self.beta, *[1.0] * (len(update.terms) - 1)]
                params.noise.update_(name, m, update.terms, decays, start)
                if write:
                    take(theta, torch.mul(m, update.rate, out=step), update.decay)

    def _move_by_window(self, params: Params, updates: list[Update], number: int) -> None:
        """Do the last `number` of these updates to theta, each by the last `window` of its moment's terms."""
        window, chains = self.config.window or 1, []
        for i in range(len(updates) - number, len(updates)):
            looked_at, share, chain = updates[max(0, i + 1 - window) : i + 1], 1.0, []
            for past in reversed(looked_at):
                chain += [(at, c * share * updates[i].rate) for at, c in past.terms]
                share *= self.beta
            chains.append((chain[::-1], updates[i].decay))  # the smallest first
        for name, start, theta in params.blocks():
            step = torch.empty_like(theta)
            for chain, decay in chains:
                params.noise.update_(name, step.zero_(), chain, [1.0] * len(chain), start)
                take(theta, step, decay)

    def buffer(self, held: dict[str, Tensor], params: Params, name: str) -> Tensor:
        """Return a tensor's moment out of `held`, flat; zeros where there is none yet."""
        if name not in held:
            held[name] = torch.zeros_like(params.tensors[name].data.view(-1))
        return held[name]


def take(theta: Tensor, step: Tensor, decay: float) -> None:
    """theta <- decay theta - step, each product and the difference rounded: the same bits on every device."""
    if decay != 1.0:
        theta.mul_(decay)
    theta.sub_(step)
