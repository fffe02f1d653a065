"""Estimate the learning rate at which one MeZO step is expected to lower the loss most.

A step on batch B along z changes theta by -lr g z, g = z . grad L_B. To second order the loss L changes by

    -lr g (z . grad L) + lr^2 / 2 g^2 (z . H z),         H the Hessian of L

The mean over batches and directions, with E[z z^T] = I, is -lr |grad L|^2 + lr^2 / 2 E[g^2 z.Hz], and it is lowest at

    lr = |grad L|^2 / E[g^2 z.Hz]

Both come from losses alone. g1 and g2, of two independent batches along the same z, have E[g1 g2] = |grad L|^2, without
the noise of the batches that g^2 has. z . H z is the second difference of the losses, (L+ + L- - 2 L) / eps^2, taken on
the batch that g is not of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mezo_cli.diagnosis.losses import Losses, Point, batches_of

FLOAT32_STEP = 2.0**-24  # relative rounding error of a loss
MIN_DIRECTIONS = 4


@dataclass(frozen=True)
class Measured:
    """What one direction gives: g and the second difference h of two independent batches, and the loss at theta."""

    g: tuple[float, float]
    h: tuple[float, float]
    loss: float


@dataclass(frozen=True)
class Estimate:
    """The terms of the expected change of the loss, -lr gain + lr^2 / 2 harm, and what follows.

    Attributes:
        gain: |grad L|^2, with its standard error `gain_error`.
        harm: E[g^2 z.Hz].
        batch_gain: E[g^2], the squared gradient of a batch: the noise of the batches included.
        curvature: mean of z.Hz, about the trace of H.
        curvature_floor: what rounding of the losses alone can make of the curvature.
        loss: at theta, of one batch.
        lr: the best learning rate, with its standard error `lr_error` (jackknife over directions).
        directions: their number.
    """

    gain: float
    gain_error: float
    harm: float
    batch_gain: float
    curvature: float
    curvature_floor: float
    loss: float
    lr: float
    lr_error: float
    directions: int

    @property
    def is_resolved(self) -> bool:
        """Whether gain and curvature stand out of their errors, so that `lr` means something."""
        return self.gain > self.gain_error and self.curvature > 2 * self.curvature_floor and self.harm > 0

    def expected_change(self, lr: float, samples: int = 1) -> float:
        """Return the expected change of the loss by one step; the mean of n samples has a n-th of the harm."""
        return -lr * self.gain + lr * lr / 2 * self.harm / samples


def from_losses(losses: Losses, eps: float, whole: bool) -> list[Measured]:
    """Return what every direction gives of which both batches and the losses at theta are measured in float32."""
    found = []
    for k in sorted({point.direction for point in losses if point.direction >= 0}):
        batches = batches_of(k, whole)
        pairs = [Point(k, batch, eps, "float32") for batch in batches]
        middles = [Point(-1, batch, 0.0, "float32") for batch in batches]
        if all(point in losses for point in (*pairs, *middles)):
            g, h = [], []
            for pair, middle in zip(pairs, middles, strict=True):
                (plus, minus), (loss, _) = losses[pair], losses[middle]
                g.append((plus - minus) / (2 * eps))
                h.append((plus + minus - 2 * loss) / eps**2)
            found.append(Measured((g[0], g[1]), (h[0], h[1]), losses[middles[0]][0]))
    return found


def estimate(measured: Sequence[Measured], eps: float) -> Estimate | None:
    """Estimate the best learning rate; None with too few directions or a loss that is not finite."""
    g = np.array([one.g for one in measured], dtype=np.float64)
    h = np.array([one.h for one in measured], dtype=np.float64)
    n = len(measured)
    if n < MIN_DIRECTIONS or not (np.isfinite(g).all() and np.isfinite(h).all()):
        return None
    gains, harms = g[:, 0] * g[:, 1], (g[:, 0] ** 2 * h[:, 1] + g[:, 1] ** 2 * h[:, 0]) / 2
    gain, harm = float(gains.mean()), float(harms.mean())
    without = (gains.sum() - gains) / np.where(harms.sum() - harms == 0, np.nan, harms.sum() - harms)
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    rounding = 4 * FLOAT32_STEP * abs(measured[0].loss) / eps**2
    return Estimate(
        gain=gain,
        gain_error=float(gains.std(ddof=1)) / math.sqrt(n),
        harm=harm,
        batch_gain=float((g**2).mean()),
        curvature=float(h.mean()),
        curvature_floor=rounding / math.sqrt(n),
        loss=measured[0].loss,
        lr=gain / harm if harm else math.inf,
        lr_error=error,
        directions=n,
    )
