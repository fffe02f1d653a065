"""What the ranks that share a run agree on: the step to resume at, equal rows and weights."""

from mezo_cli import models
from mezo_cli.config.schema import Config, Splits
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from mezo_cli.training import restore
from mezo_cli.training.setup import Session


def find_resume_step(config: Config, run: Run, ranks: Ranks | None) -> int | None:
    """Return `restore.find_resume_step` of rank 0: only that rank reads files that are being repaired."""
    if ranks is None:
        return restore.find_resume_step(config, run)
    found = str(restore.find_resume_step(config, run)) if ranks.is_first else ""
    found = ranks.from_first(found)
    return None if found == "None" else int(found)


def check_rows(config: Config, splits: Splits, ranks: Ranks) -> None:
    """Check that all ranks have the same rows, and one for each rank at least.

    Raises:
        UserError: when they have not.
    """
    ranks.check_same("data", f"sha256 {splits.fingerprint[:16]}")
    rows = min(config.batch_size, len(splits.train))
    if ranks.split == "rows" and rows < ranks.size:
        raise UserError(f"distributed.split=rows: a step has {rows} rows, fewer than {ranks.size} ranks")


def check_same_weights(session: Session, ranks: Ranks) -> None:
    """Check that all ranks start from the same weights.

    Raises:
        UserError: when they do not.
    """
    path, fingerprint = session.config.model.path, models.fingerprint(session.loaded.model)
    ranks.check_same("model", f"model.path={path} with weights of sha256 {fingerprint[:16]}")
