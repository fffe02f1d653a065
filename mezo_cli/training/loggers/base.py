"""The interface of a logger, and the one that drops everything."""

from pathlib import Path
from typing import Protocol

from mezo_cli.config.schema import LoggerConfig


class Logger(Protocol):
    """A destination for scalars. A logger writes only to its own subfolder of the run directory."""

    def __init__(self, config: LoggerConfig, run_dir: Path) -> None: ...

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Record the scalars of a step; the names are `train/loss`, `dev/accuracy`, ..."""

    def close(self) -> None:
        """Flush and close, however the run ended."""


class NoLogger:
    """A logger that does nothing: the run directory has the same scalars in metrics.jsonl."""

    def __init__(self, config: LoggerConfig, run_dir: Path) -> None:
        pass

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
