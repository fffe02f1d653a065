"""Where a run's scalars go besides its own files: TensorBoard or Weights & Biases, by choice."""

from pathlib import Path
from typing import Any, Protocol

from mezo_cli.errors import UserError
from mezo_cli.schema import LoggerConfig


class Logger(Protocol):
    """A sink for scalars."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""

    def close(self) -> None:
        """Flush and end."""


class NoLogger:
    """The run directory's own files are enough."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Drop them."""

    def close(self) -> None:
        """Nothing to end."""


class TensorBoardLogger:
    """Event files under RUN/tensorboard."""

    def __init__(self, config: LoggerConfig, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("logger=tensorboard needs a package: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Add each scalar under its name."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run whose files lie under RUN/wandb."""

    def __init__(self, config: LoggerConfig, folder: Path) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as error:
            raise UserError("logger=wandb needs a package: pip install wandb") from error
        self._run: Any = wandb.init(project=config.project, dir=str(folder), name=folder.name)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Send the scalars."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


LOGGERS: dict[str, Any] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def make(config: LoggerConfig, folder: Path) -> Logger:
    """Return the logger of that name.

    Raises:
        UserError: when its package is not installed.
    """
    return NoLogger() if config.name == "none" else LOGGERS[config.name](config, folder)
