"""One run for all ranks: rank 0 creates or claims the run directory, the others follow it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mezo_cli.config.schema import Config
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import UserError
from mezo_cli.optim.settings import ZerothOrderConfig
from mezo_cli.runs import Run
from mezo_cli.runs.followed import FollowedRun


def share_run(ranks: Ranks | None, claim: Callable[[], tuple[Run, Config] | None]) -> tuple[Run, Config] | None:
    """Return the run and its config on every rank.

    Args:
        ranks: those that share the run; None if this process is alone.
        claim: creates or claims the run directory, on rank 0 alone; returns None when there is nothing to do.

    Raises:
        UserError: when `claim` does, and when a rank does not see the directory.
    """
    if ranks is None:
        return claim()
    if ranks.is_first:
        claimed = claim()
        ranks.from_first("" if claimed is None else json.dumps([str(claimed[0].path), to_yaml(claimed[1])]))
        return claimed
    received = ranks.from_first()
    if not received:
        return None
    path, text = json.loads(received)
    return FollowedRun(Path(path)), from_yaml(text)


@contextmanager
def in_turn(ranks: Ranks | None) -> Iterator[None]:
    """Let rank 0 pass the block first, which may repair or download files, and then the others."""
    if ranks is not None and not ranks.is_first:
        ranks.from_first()
    yield
    if ranks is not None and ranks.is_first:
        ranks.from_first("passed")


def check_shareable(config: Config, size: int) -> None:
    """Check that a run has a step that so many ranks can share.

    Raises:
        UserError: when it has none, or less than one direction or row for each rank.
    """
    chosen = config.optimizer
    if config.engine.name != "none":
        raise UserError(
            f"engine={config.engine.name}: {size} ranks were started, and they cannot share an engine; "
            "run it by one process: engine.tensor_parallel=N shards the model"
        )
    if not isinstance(chosen, ZerothOrderConfig):
        raise UserError(
            f"optimizer={chosen.name}: {size} ranks were started, but ranks share forward passes alone; "
            "run it by one process, or choose mezo, mezo_momentum or mezo_adam"
        )
    split = config.distributed.split
    if split == "directions" and chosen.samples < size:
        raise UserError(
            f"distributed.split=directions: optimizer.samples={chosen.samples} is less than {size} ranks; "
            "start fewer, or use distributed.split=rows"
        )
    by_rows = config.distributed.shard == "none" and (split == "rows" or chosen.samples < size)
    if by_rows and config.batch_size < size:
        raise UserError(f"batch_size={config.batch_size} is less than {size} ranks, which share its rows; start fewer")
