"""Open what a command is given: a run, a checkpoint folder in one, a trajectory folder; or where it looks for runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mezo_cli.config.schema import Config
from mezo_cli.config.stored import read_config
from mezo_cli.errors import UserError
from mezo_cli.optim import optimizer_class
from mezo_cli.runs import Run, checkpoints
from mezo_cli.system import import_torch

if TYPE_CHECKING:  # they import torch
    from mezo_cli.sharing.shared_run import SharedRun
    from mezo_cli.training.session import Session

OUTPUTS = Path("outputs")


@dataclass(frozen=True)
class Opened:
    """A run and the weights that are asked for.

    Attributes:
        checkpoint: `best`, `last` or a step number.
        name: run and checkpoint, for messages.
        published: the trajectory folder that the run is; None for a run of this machine.
    """

    run: Run
    config: Config
    checkpoint: str
    name: str
    published: "SharedRun | None" = None

    def step(self) -> int:
        """Return the step of the weights."""
        import_torch()
        from mezo_cli.training import restore

        if self.published is not None and self.checkpoint in self.published.weights:
            return int(self.published.weights[self.checkpoint]["step"])
        return restore.find_step(self.config, self.run, self.checkpoint)

    def load(self) -> "Session":
        """Return a session at the weights. Those of a trajectory folder are rebuilt from the base model and checked."""
        import_torch()
        from mezo_cli import models
        from mezo_cli.training import restore

        if self.published is None:
            return restore.load_checkpoint(self.config, self.run, self.checkpoint)
        from mezo_cli.sharing.shared_run import check_weights

        step = self.step()
        session = restore.replay_from_base(self.config, self.run, step)
        check_weights(self.published, step, models.fingerprint(session.loaded.model))
        return session


def open_run(path: Path, checkpoint: str | None, base: Path | None = None) -> Opened:
    """Open a run directory, a checkpoint folder in one, or a trajectory folder, which may be `hub:USER/REPO`.

    Args:
        path: the folder.
        checkpoint: `best` (if None), `last` or a step number; None for a checkpoint folder, which is one already.
        base: of a trajectory folder: the folder of its base model.
    """
    if is_trajectory_folder(path):
        import_torch()
        from mezo_cli.sharing.shared_run import open_shared

        published = open_shared(path, base)
        wanted = checkpoint or "best"
        return Opened(published.run, published.config, wanted, f"{published.name} {wanted}", published)
    if base is not None:
        raise UserError(f"--base {base} needs a trajectory folder; a run has its own model.path")
    is_run = (path / "config.yaml").is_file() or not path.is_dir()
    inside = None if is_run else checkpoints.find_run(path)
    if inside is not None and checkpoint is not None:
        raise UserError(
            f"--checkpoint {checkpoint}: {path} is the checkpoint '{path.name}' of {inside} already; the option needs "
            "a run directory"
        )
    folder, wanted = (path, checkpoint or "best") if inside is None else (inside, path.resolve().name)
    run, config = open_stored(folder)
    return Opened(run, config, wanted, f"{folder} {wanted}")


def open_stored(path: Path) -> tuple[Run, Config]:
    """Open a run directory; return the run and its config."""
    run = Run.open(path)
    config = read_config(path / "config.yaml")
    run.check_finished(config.steps, optimizer_class(config.optimizer).replayable)
    return run, config


def is_trajectory_folder(path: Path) -> bool:
    """Return whether a path is `hub:USER/REPO` or a trajectory folder (sharing/trajectory_folder.py)."""
    return str(path).startswith("hub:") or (path / "export.json").is_file()


def folders_or_outputs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders in which runs are looked for; outputs/ if none is named."""
    if not folders and not OUTPUTS.is_dir():
        raise UserError(f"no runs: there is no folder {OUTPUTS}/ here; name the folder of your runs")
    return list(folders) or [OUTPUTS]
