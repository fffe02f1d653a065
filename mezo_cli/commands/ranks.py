"""A run that the ranks of a `torchrun` share: whether they can, and which directory it has."""

import json
from pathlib import Path

from mezo_cli.config.explain import readers
from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import UserError, join
from mezo_cli.runs import ReadOnlyRun, Run


def broadcast_run(ranks: Ranks, claimed: tuple[Run, Config] | None) -> tuple[Run, Config] | None:
    """Return the run and its config on every rank: rank 0 has claimed the directory, the others follow it.

    `claimed` is None when there is nothing to do, and on the other ranks.
    """
    if ranks.is_first:
        ranks.from_first("" if claimed is None else json.dumps([str(claimed[0].path), to_yaml(claimed[1])]))
        return claimed
    if not (received := ranks.from_first()):
        return None
    path, text = json.loads(received)
    return ReadOnlyRun(Path(path)), from_yaml(text)


def check_shareable(config: Config, size: int) -> None:
    """Check that a run has a step that so many ranks can share."""
    chosen = config.optimizer
    if not isinstance(chosen, PerturbationConfig):
        raise UserError(
            f"optimizer={chosen.name}: {size} ranks were started, but ranks share forward passes alone; "
            f"run it by one process, or choose one of {join(readers('optimizer', 'eps'))}"
        )
    if config.model.stream:
        raise UserError(f"model.stream=true: {size} ranks were started, and each would read the layers; use false")
    split, directions = config.distributed.split, f"{chosen.points} direction{'' if chosen.points == 1 else 's'}"
    if split == "directions" and chosen.points < size:
        raise UserError(
            f"distributed.split=directions: a step has {directions}, fewer than {size} ranks; "
            "start fewer, or use distributed.split=rows"
        )
    by_rows = split == "rows" or chosen.points < size
    if by_rows and config.objective.loss == "reward":
        raise UserError(
            f"objective.loss={config.objective.loss}: a step has {directions}, fewer than {size} ranks, which share "
            "the members of a step, not its rows; start fewer, or raise optimizer.samples or optimizer.members"
        )
    if by_rows and config.batch_size < size:
        raise UserError(f"batch_size={config.batch_size} is less than {size} ranks, which share its rows; start fewer")
