"""Check that the compute dtype resolves the difference of losses that MeZO's gradient estimate is made of.

The losses at theta + eps z and theta - eps z differ in the third or fourth digit, and bfloat16 has three. The error of
the projected gradients depends on the model, on eps and on the batch (docs/measurements/step.md has a table), so it is
measured on the run's own first batch. `mezo doctor` measures more of it, by the same functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mezo_cli import models
from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.config.schema import Config
from mezo_cli.console import log
from mezo_cli.distributed.ranks import current
from mezo_cli.models.loading import has_fast_float16
from mezo_cli.optim import LossFn
from mezo_cli.optim.mezo import spsa
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import Run, recovery
from mezo_cli.session.session import Session

DIRECTIONS = 8
MAX_RELATIVE_ERROR = 0.5  # of the projected gradients; above it the user is warned
MAX_OFF = 0.2  # the most that they may be off the derivative of the loss along z
EPS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # that are tried


@dataclass(frozen=True)
class Agreement:
    """How projected gradients g' agree with others, g, of the same directions and batches.

    Attributes:
        correlation: of g' with g; nan if one of them does not vary.
        relative_error: |g' - g| / |g|; inf if g is 0 in all directions.
        zeros: fraction of directions in which g' is exactly 0.
        directions: their number.
    """

    correlation: float
    relative_error: float
    zeros: float
    directions: int


def with_compute_dtype(config: Config, run: Run) -> Config:
    """Return the config with a dtype of its forwards, chosen once, by rank 0, which its files have then."""
    chosen = current.get().from_first(models.resolved(config.model).computes_in)
    found = config.replace(model=config.model.replace(compute_dtype=chosen))
    recovery.change_config(run, found, {"model.compute_dtype": None}, {"model.compute_dtype": chosen})
    return found


def check(session: Session, loss_fn: LossFn) -> None:
    """Log the relative error that the compute dtype causes, as a warning if it is large."""
    eps, dtype = zeroth_order(session.config.optimizer).eps, session.forward.compute_dtype
    exact = projected_grads(session, loss_fn, eps, torch.float32)
    error = agreement(projected_grads(session, loss_fn, eps, dtype), exact).relative_error
    name, plain = session.config.model.computes_in, describe_exact(session)
    text = f"{name}: projected gradients are off by {100 * error:.0f}% (|g' - g| / |g|; g: {plain})"
    if math.isnan(error):
        log.warning("warning: %s: a loss at theta +- eps z is not finite%s", name, session.config.model.wider_range)
        return
    if name == "bfloat16" and has_fast_float16(session.loaded.device):
        off = agreement(projected_grads(session, loss_fn, eps, torch.float16), exact).relative_error
        text += f"; model.compute_dtype=float16 by {100 * off:.0f}%, as fast here" if math.isfinite(off) else ""
    if error <= MAX_RELATIVE_ERROR:
        log.info("%s", text)
        return
    streams = session.config.model.stream  # a pass over the files takes long
    advice = "mezo doctor tries a larger optimizer.eps" if streams else f"no optimizer.eps up to {EPS[-1]:g} would do"
    for larger in () if streams else (size for size in EPS if size > eps):
        off = agreement(projected_grads(session, loss_fn, larger, dtype), exact).relative_error
        if off <= MAX_OFF:
            advice = f"optimizer.eps={larger:g} would do, off by {100 * off:.0f}%"
            break
    log.warning("warning: %s: rounding makes them noisy; %s; or use a larger batch_size, or float32", text, advice)


def describe_exact(session: Session) -> str:
    """Return what g is computed in: frozen weights are stored in theta's dtype, or else in the compute dtype."""
    if session.params.dtype != torch.float32:
        return f"in float32, from the same {session.config.model.dtype} weights"
    frozen = any(p.dtype != torch.float32 for p in session.loaded.model.parameters())
    return "trainable weights and activations in float32, frozen weights rounded" if frozen else "all in float32"


@torch.no_grad()
def projected_grads(session: Session, loss_fn: LossFn, eps: float, dtype: torch.dtype) -> list[float]:
    """Return the projected gradients in the run's first directions; theta is not changed.

    Frozen weights are rounded to the run's compute dtype, whatever `dtype` is (`PerturbedForward.set_compute_dtype`).
    """
    count = 2 if session.config.model.stream else DIRECTIONS
    with session.forward.using_compute_dtype(dtype):
        directions = [Direction(session.config.seed, step) for step in range(count)]
        return [g for _, _, g in spsa(session.forward, loss_fn, directions, eps)]


def agreement(rounded: Sequence[float], exact: Sequence[float]) -> Agreement:
    """Compare projected gradients with others of the same directions."""
    g, exact_g = np.array(rounded, dtype=np.float64), np.array(exact, dtype=np.float64)
    norm = float(np.linalg.norm(exact_g))
    varies = len(g) > 1 and g.std() > 0 and exact_g.std() > 0
    return Agreement(
        correlation=float(np.corrcoef(g, exact_g)[0, 1]) if varies else math.nan,
        relative_error=float(np.linalg.norm(g - exact_g)) / norm if norm else math.inf,
        zeros=float((g == 0).mean()),
        directions=len(g),
    )
