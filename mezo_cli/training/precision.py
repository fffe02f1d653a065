"""Check that the compute dtype resolves the difference of losses that MeZO's gradient estimate is made of.

The losses at theta + eps z and theta - eps z differ in the third or fourth digit, and bfloat16 has three. The error of
the projected gradients depends on the model, on eps and on the batch (docs/measurements/step.md has a table), so it is
measured on the run's own first batch. `mezo doctor` measures more of it, by the same functions.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.optim import LossFn
from mezo_cli.optim.mezo import spsa
from mezo_cli.perturb.noise import Direction
from mezo_cli.training.session import Session

log = logging.getLogger("mezo")

DIRECTIONS = 8
MAX_RELATIVE_ERROR = 0.5  # of the projected gradients; above it the user is warned


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


def check(session: Session, loss_fn: LossFn) -> None:
    """Log the relative error that the compute dtype causes, as a warning if it is large. Skipped for float32."""
    if session.forward.compute_dtype == torch.float32:
        return
    error = relative_error(session, loss_fn)
    dtype = session.config.model.compute_dtype
    text = f"{dtype}: projected gradients are off by {100 * error:.0f}% (|g' - g| / |g|; g: {describe_exact(session)})"
    if error > MAX_RELATIVE_ERROR:
        log.warning(
            "warning: %s: rounding hides the signal; try a larger optimizer.eps or batch_size, or float32", text
        )
    else:
        log.info("%s", text)


def describe_exact(session: Session) -> str:
    """Return what g is computed in: frozen weights are stored in theta's dtype, or else in the compute dtype."""
    if session.params.dtype != torch.float32:
        return f"in float32, from the same {session.config.model.dtype} weights"
    frozen = any(p.dtype != torch.float32 for p in session.loaded.model.parameters())
    return "trainable weights and activations in float32, frozen weights rounded" if frozen else "all in float32"


def relative_error(session: Session, loss_fn: LossFn, directions: int = DIRECTIONS) -> float:
    """Return |g' - g| / |g|: projected gradients g' in the compute dtype, g in float32, in the run's first directions.

    Frozen weights are rounded to the compute dtype for both (`PerturbedForward.set_compute_dtype`).

    It takes four forwards per direction and does not change theta. It is inf if g is 0 in all directions.
    """
    eps, dtypes = zeroth_order(session.config.optimizer).eps, (torch.float32, session.forward.compute_dtype)
    exact, rounded = (
        [measure_losses(session, loss_fn, step, eps, dtype)[2] for step in range(directions)] for dtype in dtypes
    )
    return agreement(rounded, exact).relative_error


@torch.no_grad()
def measure_losses(
    session: Session, loss_fn: LossFn, step: int, eps: float, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Return L(theta + eps z), L(theta - eps z) and the projected gradient, in the direction z of a step of the run."""
    with session.forward.using_compute_dtype(dtype):
        return spsa(session.forward, loss_fn, Direction(session.config.seed, step), eps)


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
