"""Send scalars to Weights & Biases; its local files are under RUN/wandb."""

from pathlib import Path
from typing import Any

from mezo_cli.config.schema import LoggerConfig
from mezo_cli.errors import UserError


class WandbLogger:
    """A Weights & Biases run, named after the run directory."""

    def __init__(self, config: LoggerConfig, run_dir: Path) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as error:
            raise UserError("logger=wandb needs a package: pip install wandb") from error
        self._run: Any = wandb.init(project=config.project, dir=str(run_dir), name=run_dir.name)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Send the scalars."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()
