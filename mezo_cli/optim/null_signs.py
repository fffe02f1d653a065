"""The null method: MeZO with the sign of every g replaced by one that is drawn, as a control.

    theta <- theta - lr (s g z + wd theta),   s = -1 or 1, a function of (seed, step, sample)

It takes steps of MeZO's sizes along MeZO's directions, in a sense that knows nothing of the loss: what it gains over
zero-shot is what the choice of a checkpoint on dev gains alone. Settings, costs and scalars are those of mezo.py: the
trajectory holds g without s. lr 1e-6, eps 1e-3.
"""

from hashlib import blake2b

from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.mezo import Mezo


class NullSigns(Mezo):
    """MeZO with random signs."""

    def gradients(self, record: StepRecord) -> list[float]:
        """Return s g of each of a step's directions, g clipped."""
        grads = super().gradients(record)
        return [random_sign(self.seed, record[0], sample) * g for sample, g in enumerate(grads)]


def random_sign(seed: int, step: int, sample: int) -> int:
    """Return -1 or 1, independent of z."""
    digest = blake2b(f"{seed}\0null_signs\0{step}\0{sample}".encode(), digest_size=1).digest()
    return 1 if digest[0] & 1 else -1
