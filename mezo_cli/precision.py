"""Whether a low compute dtype keeps the signal that MeZO lives on.

The losses at theta + eps z and theta - eps z differ in their third or fourth place, and bfloat16 keeps three. What is
left of a projected gradient depends on the model, on eps and on the batch (docs/step.md has a table): it is measured,
on the first batch of the run itself.
"""

import logging

import torch

from mezo_cli.noise import Direction
from mezo_cli.objectives.batches import Batch
from mezo_cli.session import Session

log = logging.getLogger("mezo")

DIRECTIONS = 8
DROWNED = 0.5  # relative error of the projected gradients above which a run is warned about


@torch.no_grad()
def error_of(session: Session, batch: Batch, directions: int = DIRECTIONS) -> float:
    """Return |g' - g| / |g|, g' in the compute dtype, g in float32, along the first directions of the run.

    Four forwards a direction. theta is not moved. It is inf where g is 0 along all of them.
    """
    pairs = [
        [_projected_grad(session, batch, step, dtype) for dtype in (torch.float32, session.params.compute_dtype)]
        for step in range(directions)
    ]
    exact, rounded = torch.tensor(pairs, dtype=torch.float64).T
    return float((rounded - exact).norm() / exact.norm()) if bool(exact.any()) else float("inf")


def warn(session: Session, batch: Batch) -> None:
    """Say so where the compute dtype drowns the signal; a run in float32 is not asked."""
    if session.params.compute_dtype == torch.float32:
        return
    error = error_of(session, batch)
    told = f"{session.config.model.compute_dtype}: projected gradients are off by {100 * error:.0f}% (|g' - g| / |g|)"
    if error > DROWNED:
        log.warning("warning: %s: the signal drowns; try a larger optimizer.eps or batch_size, or float32", told)
    else:
        log.info("%s", told)


def _projected_grad(session: Session, batch: Batch, step: int, dtype: torch.dtype) -> float:
    config = session.config
    with (
        session.params.computing(dtype),
        session.params.at(Direction(config.seed, step), config.optimizer.eps, -config.optimizer.eps),
    ):
        plus, minus = session.loss(batch).tolist()
    return (plus - minus) / (2 * config.optimizer.eps)
