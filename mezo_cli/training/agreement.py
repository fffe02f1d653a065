"""What the ranks that share a run agree on: the step to resume at, equal rows, equal weights at every evaluation."""

import logging

from mezo_cli import models
from mezo_cli.config.schema import Config, Splits
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import RunFailed, UserError, join
from mezo_cli.runs import Run, recovery
from mezo_cli.training import restore
from mezo_cli.training.session import Session

log = logging.getLogger("mezo")

REBUILD_SECONDS = 3600.0  # how long the others wait for a rank that rebuilds its weights


def find_resume_step(config: Config, run: Run, ranks: Ranks) -> int | None:
    """Return `recovery.find_resume_step` of rank 0: only that rank reads files that are being repaired."""
    step = ranks.from_first(str(recovery.find_resume_step(config, run)) if ranks.is_first else "")
    return None if step == "None" else int(step)


def check_rows(config: Config, splits: Splits, ranks: Ranks) -> None:
    """Check that all ranks have the same rows; and, if they share them, one each at least."""
    ranks.check_same("set of rows", f"rows of sha256 {splits.fingerprint[:16]}")
    rows = min(config.batch_size, len(splits.train))
    if ranks.split == "rows" and rows < ranks.size:
        raise UserError(f"distributed.split=rows: a step has {rows} rows, fewer than {ranks.size} ranks")


def check_same_weights(session: Session, ranks: Ranks) -> None:
    """Check that all ranks start from the same weights."""
    if ranks.size == 1:
        return
    path, loaded = session.config.model.path, session.loaded
    fingerprint = models.fingerprint(loaded.model)
    ranks.check_same("model", f"model.path={path} with weights of sha256 {fingerprint[:16]}")


def repair_weights(session: Session, run: Run, step: int, ranks: Ranks) -> None:
    """Compare the weights of all ranks; let a rank that differs from rank 0 rebuild its own from the trajectory.

    Raises:
        RunFailed: when they still differ then.
    """
    differing = _find_differing(session, ranks, ranks.timeout) if ranks.size > 1 else []
    if not differing:
        return
    names = join(f"rank {rank}" for rank in differing)
    log.warning("warning: step %d: the weights of %s differ from rank 0's; rebuilding them by a replay", step, names)
    if ranks.rank in differing:
        restore.rebuild(session, run, step)
    differing = _find_differing(session, ranks, max(REBUILD_SECONDS, ranks.timeout))
    if differing:
        names = join(f"rank {rank}" for rank in differing)
        raise RunFailed(
            f"step {step}: the weights of {names} differ from rank 0's after a replay of {run.trajectory} too"
        )


def _find_differing(session: Session, ranks: Ranks, timeout: float) -> list[int]:
    fingerprints = ranks.exchange(models.fingerprint(session.loaded.model), timeout)
    return [rank for rank, one in enumerate(fingerprints) if one != fingerprints[0]]
