"""Check that the compute dtype resolves the difference of losses that MeZO's gradient estimate is made of.

The losses at theta + eps z and theta - eps z differ in the third or fourth digit, and bfloat16 has three. The error of
the projected gradients depends on the model, on eps and on the batch (docs/step.md has a table), so it is measured on
the run's own first batch.
"""

import logging
from functools import partial

import torch

from mezo_cli.objectives.collate import Batch
from mezo_cli.optim.mezo import spsa
from mezo_cli.perturb.noise import Direction
from mezo_cli.training.setup import Session

log = logging.getLogger("mezo")

DIRECTIONS = 8
MAX_RELATIVE_ERROR = 0.5  # of the projected gradients; above it the user is warned


def check(session: Session, batch: Batch) -> None:
    """Log the relative error that the compute dtype causes, as a warning if it is large. Skipped for float32."""
    if session.forward.compute_dtype == torch.float32:
        return
    error = relative_error(session, batch)
    # Frozen weights are stored in the compute dtype, so g is then float32 for the trainable ones alone.
    frozen = any(p.dtype != torch.float32 for p in session.loaded.model.parameters())
    g = "g: trainable weights and activations in float32, frozen weights rounded" if frozen else "g: all in float32"
    dtype = session.config.model.compute_dtype
    text = f"{dtype}: projected gradients are off by {100 * error:.0f}% (|g' - g| / |g|; {g})"
    if error > MAX_RELATIVE_ERROR:
        log.warning(
            "warning: %s: rounding hides the signal; try a larger optimizer.eps or batch_size, or float32", text
        )
    else:
        log.info("%s", text)


@torch.no_grad()
def relative_error(session: Session, batch: Batch, directions: int = DIRECTIONS) -> float:
    """Return |g' - g| / |g|: projected gradients g' in the compute dtype, g in float32, in the run's first directions.

    Frozen weights are rounded to the compute dtype for both (`PerturbedForward.set_compute_dtype`).

    It takes four forwards per direction and does not change theta. It is inf if g is 0 in all directions.
    """
    pairs = [
        [_projected_grad(session, batch, step, dtype) for dtype in (torch.float32, session.forward.compute_dtype)]
        for step in range(directions)
    ]
    exact, rounded = torch.tensor(pairs, dtype=torch.float64).T
    return float((rounded - exact).norm() / exact.norm()) if bool(exact.any()) else float("inf")


def _projected_grad(session: Session, batch: Batch, step: int, dtype: torch.dtype) -> float:
    z, eps = Direction(session.config.seed, step), session.config.optimizer.eps
    with session.forward.using_compute_dtype(dtype):
        return spsa(session.forward, partial(session.loss, batch), z, eps)[2]
