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
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.config.rates import advise, find_rate
from mezo_cli.config.schema import Config
from mezo_cli.diagnosis.findings import DOUBT, OK, UNKNOWN, Section, count, short

FLOAT32_STEP = 2.0**-24  # relative rounding error of a loss
MIN_DIRECTIONS = 4
TOO_LARGE = 2.0  # times the best lr: beyond it a step is expected to raise the loss
LITTLE = 0.1  # of the loss: a run whose steps together are expected to lower it by less is too short or too slow
PAPER_EPS = 1e-3
BELOW_ROW = 10  # a rate below a row's by more than this is below the paper's grid, and below all that was measured


@dataclass(frozen=True)
class Estimate:
    """The terms of the expected change of the loss, -lr gain + lr^2 / 2 harm, and what follows."""

    gain: float  # |grad L|^2, with its standard error `gain_error`
    gain_error: float
    harm: float  # E[g^2 z.Hz]
    curvature: float  # mean of z.Hz, about the trace of H
    curvature_floor: float  # what rounding of the losses alone can make of the curvature
    loss: float  # at theta, of one batch
    lr: float  # the best learning rate, with its standard error `lr_error` (jackknife over directions)
    lr_error: float
    directions: int  # their number

    @property
    def is_resolved(self) -> bool:
        """Whether gain and curvature stand out of their errors, so that `lr` means something."""
        return self.gain > self.gain_error and self.curvature > 2 * self.curvature_floor and self.harm > 0


def estimate(measured: np.ndarray, eps: float) -> Estimate | None:
    """Estimate the best learning rate; None with too few directions or a loss that is not finite.

    Args:
        measured: loss_plus, loss_minus and the loss at theta, float64, [directions, two independent batches, 3].
        eps: of the losses.
    """
    n = len(measured)
    if n < MIN_DIRECTIONS or not np.isfinite(measured).all():
        return None
    plus, minus, middle = np.moveaxis(measured, 2, 0)
    g, h, loss = (plus - minus) / (2 * eps), (plus + minus - 2 * middle) / eps**2, float(middle[0, 0])
    gains, harms = g[:, 0] * g[:, 1], (g[:, 0] ** 2 * h[:, 1] + g[:, 1] ** 2 * h[:, 0]) / 2
    gain, harm = float(gains.mean()), float(harms.mean())
    without = (gains.sum() - gains) / np.where(harms.sum() - harms == 0, np.nan, harms.sum() - harms)
    return Estimate(
        gain=gain,
        gain_error=float(gains.std(ddof=1)) / math.sqrt(n),
        harm=harm,
        curvature=float(h.mean()),
        curvature_floor=4 * FLOAT32_STEP * abs(loss) / eps**2 / math.sqrt(n),
        loss=loss,
        lr=gain / harm if harm else math.inf,
        lr_error=math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum())),
        directions=n,
    )


def judge(
    section: Section, estimated: Estimate | None, config: Config, larger_eps: float | None, parameters: int
) -> None:
    """Judge optimizer.lr against the one at which a step is expected to help most, for plain MeZO and n-SPSA.

    `larger_eps`: to try where the run's is lost in rounding; `parameters`: of the model, for the rate that runs like
    this one begin with.
    """
    lr, n = config.optimizer.lr, zeroth_order(config.optimizer).directions
    figures: dict[str, Any] = {"optimizer_lr": lr, **({} if estimated is None else asdict(estimated)), "lr": None}
    why, advice = _not_judged(estimated, config, larger_eps)
    terms = ""
    if estimated is not None:
        gain = f"{short(estimated.gain)} +- {short(estimated.gain_error)}"
        measured = count(estimated.directions, "direction")
        terms = f" (|gradient|^2 {gain}, z.Hz {short(estimated.curvature)}; {measured})"
    if estimated is None or why:
        section.add(UNKNOWN, "learning_rate", f"optimizer.lr={lr:g} was not judged: {why}{terms}", advice, **figures)
        return
    row = find_rate(parameters, config.peft.name)
    best, error = estimated.lr * n, estimated.lr_error * n
    change = -lr * estimated.gain + lr * lr / 2 * estimated.harm / n  # the mean of n samples has a n-th of the harm
    verdict, judged = DOUBT, "is too large: a step is expected to raise the loss"
    if lr > TOO_LARGE * (best + error):
        advice = f"try optimizer.lr={best:.0e}"
    elif lr < best and -change * config.steps < LITTLE * estimated.loss:
        falls = f"{short(-change * config.steps)} of {short(estimated.loss)} in {count(config.steps, 'step')}"
        judged = f"is too small for steps={config.steps}: at this rate the loss falls by {falls}"
        advice = f"raise optimizer.lr, up to {best:.0e}, or steps"
    elif row is not None and lr < row.lr / BELOW_ROW:
        judged, advice = "is too small: runs like this one hardly move with it", f"try optimizer.lr={row.lr:g}"
    else:
        verdict, judged = OK, "looks safe"
    text = (
        f"optimizer.lr={lr:g} {judged}. An upper bound for the first steps is about {best:.1e} (+- {error:.0e}){terms};"
        f" at {lr:g} the loss changes by {change:.1e} per step at first{advise(parameters, config.peft.name)}"
    )
    section.add(verdict, "learning_rate", text, advice, **(figures | {"lr": best, "expected_change": change}))


def _not_judged(estimated: Estimate | None, config: Config, larger_eps: float | None) -> tuple[str, str]:
    """Return why no best lr can be told, empty where it can, and what to do."""
    eps, more = zeroth_order(config.optimizer).eps, "give more --seconds or a larger batch_size"
    if config.optimizer.name != "mezo":
        return f"the best step of optimizer={config.optimizer.name} is not derived", ""
    if estimated is None:
        return f"fewer than {MIN_DIRECTIONS} directions were measured", "give more --seconds"
    if estimated.is_resolved:
        return "", ""
    if larger_eps is None and abs(estimated.curvature) <= 2 * estimated.curvature_floor:
        larger_eps = PAPER_EPS if eps < PAPER_EPS else 10 * eps
    if larger_eps is not None:
        why = f"optimizer.eps={eps:g} is so small that rounding hides how the loss curves"
        return why, f"use optimizer.eps={larger_eps:g}"
    if estimated.gain <= estimated.gain_error:
        return "the gradient is not told from the noise of the batches", more
    return "along these directions the loss does not curve upwards, so a step has no best length", more
