"""MeZO with lr divided by the running root mean square of the projected gradients (RMSProp on one number)."""

import math
from typing import ClassVar

from pydantic import Field

from mezo_cli.config.base import PositiveNumber
from mezo_cli.config.optimizers import MomentDecay, ZerothOrderConfig
from mezo_cli.optim.mezo import Mezo


class MezoRmsConfig(ZerothOrderConfig):
    """Settings of MeZO-RMS."""

    implementation: ClassVar[str] = "mezo_parts.rms:MezoRms"
    title: ClassVar[str] = "MeZO-RMS"
    decay: MomentDecay = Field(0.99, description="decay of the mean square")
    adam_eps: PositiveNumber = Field(1e-8, description="added to its root")


class MezoRms(Mezo):
    """MeZO whose steps do not grow with the loss. Its state is one number, rebuilt from the trajectory."""

    config: MezoRmsConfig

    def __init__(self, config, seed, steps):
        super().__init__(config, seed, steps)
        self._mean_square, self._power = 0.0, 1.0

    def rebuild_state(self, params, records):
        """Rebuild the mean square, and what `clip_g` keeps, from all steps before."""
        for record in records:
            self._rate(record)

    def apply_updates(self, params, records):
        """Update theta by each record in order."""
        terms, decays = [], []
        for record in records:
            estimate = self.estimate(record, -self._rate(record))
            terms += estimate
            decays += [1.0 - record[2] * self.config.weight_decay, *[1.0] * (len(estimate) - 1)]
        params.update(terms, decays)

    def _rate(self, record):
        """Return the step size of a record. Records must come in order, each once."""
        grads, lr, decay = self.gradients(record), record[2], self.config.decay
        self._mean_square = decay * self._mean_square + (1 - decay) * sum(g * g for g in grads) / len(grads)
        self._power *= decay
        return lr / (math.sqrt(self._mean_square / (1 - self._power)) + self.config.adam_eps)
