"""Open what a command is given: a run, or a checkpoint folder in one; or where it looks for runs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError
from mezo_cli.process.signals import import_torch
from mezo_cli.runs import Run, checkpoints

if TYPE_CHECKING:  # it imports torch
    from mezo_cli.session.session import Session

OUTPUTS = Path("outputs")


@dataclasses.dataclass(frozen=True)
class Opened:
    """A run and the weights that are asked for: `checkpoint` is `best`, `last` or a step number."""

    run: Run
    config: Config
    checkpoint: str
    has_other_base: bool = False  # its folder was given

    @property
    def name(self) -> str:
        """Run and checkpoint, for messages."""
        return f"{self.run.path} {self.checkpoint}"

    def load(self) -> "Session":
        """Open a session at the weights."""
        import_torch()
        from mezo_cli.session.opening import opened

        if self.has_other_base and self.run.checkpoints.is_dir():  # a replay checks it
            opened(self.config, self.run).close()
        return opened(self.config, self.run, int(self.checkpoint) if self.checkpoint.isdecimal() else self.checkpoint)


def open_run(path: Path, checkpoint: str | None, base: Path | None = None) -> Opened:
    """Open a run directory, or a checkpoint folder in one.

    `checkpoint`: `best` (if None), `last` or a step number; None for a checkpoint folder. `base`: the folder of the
    base model, in place of the run's `model.path`.
    """
    is_run = (path / "config.yaml").is_file() or not path.is_dir()
    inside = None if is_run else checkpoints.find_run(path)
    if inside is not None and checkpoint is not None:
        what = f"{path} is the checkpoint '{path.name}' of {inside} already"
        raise UserError(f"--checkpoint {checkpoint}: {what}; the option needs a run directory")
    folder, wanted = (path, checkpoint or "best") if inside is None else (inside, path.resolve().name)
    run = Run.open(folder)
    config = run.contents().config
    if base is not None:
        if not base.is_dir():
            raise UserError(f"--base {base}: no such folder")
        config = config.replace(model=config.model.replace(path=str(base.resolve()), revision=None))
    elif config.model.path.startswith("./") and not Path(config.model.path).exists():  # of a run that was exported
        raise UserError(f"{folder}: its base model {config.model.path[2:]} is not here: give its folder as --base DIR")
    return Opened(run, config, wanted, base is not None)


def folders_or_outputs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders in which runs are looked for; outputs/ if none is named."""
    if not folders and not OUTPUTS.is_dir():
        raise UserError(f"no runs: there is no folder {OUTPUTS}/ here; name the folder of your runs")
    return list(folders) or [OUTPUTS]
