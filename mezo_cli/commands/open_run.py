"""Open what a command on trained weights is given: a run directory, or a checkpoint folder in one."""

from dataclasses import dataclass
from pathlib import Path

from mezo_cli.config.schema import Config
from mezo_cli.config.stored import read_config
from mezo_cli.errors import UserError, did_you_mean
from mezo_cli.runs import Run, checkpoints


@dataclass(frozen=True)
class Opened:
    """A run and the weights that are asked for.

    Attributes:
        checkpoint: `best`, `last` or a step number.
        name: run and checkpoint, for messages.
    """

    run: Run
    config: Config
    checkpoint: str
    name: str


def open_run(path: Path, checkpoint: str | None) -> Opened:
    """Open a run directory, or a checkpoint folder in one.

    Args:
        path: the folder.
        checkpoint: `best` (if None), `last` or a step number; None for a checkpoint folder, which is one already.

    Raises:
        UserError: for any other folder, and when the run's config.yaml was damaged or edited.
    """
    if not path.is_dir():
        siblings = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such folder{did_you_mean(path.name, siblings)} (`mezo runs` lists the runs)")
    inside = None if (path / "config.yaml").is_file() else checkpoints.find_run(path)
    if inside is not None and checkpoint is not None:
        raise UserError(
            f"--checkpoint {checkpoint}: {path} is the checkpoint '{path.name}' of {inside} already; the option goes "
            "with a run directory"
        )
    folder, wanted = (path, checkpoint or "best") if inside is None else (inside, path.resolve().name)
    run = Run.open(folder)
    return Opened(run, read_config(folder / "config.yaml"), wanted, f"{folder} {wanted}")
