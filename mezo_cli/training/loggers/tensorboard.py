"""Write scalars as TensorBoard event files under RUN/tensorboard."""

from pathlib import Path
from typing import Any

from mezo_cli.config.schema import LoggerConfig
from mezo_cli.errors import UserError


class TensorBoardLogger:
    """TensorBoard event files."""

    def __init__(self, config: LoggerConfig, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("logger=tensorboard needs a package: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Add each scalar under its name."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
