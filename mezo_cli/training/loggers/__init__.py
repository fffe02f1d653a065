"""Loggers: where a run's scalars go besides metrics.jsonl. A logger is one module here and one row of `LOGGERS`."""

from pathlib import Path

from mezo_cli.config.registry import Registry
from mezo_cli.config.schema import LoggerConfig
from mezo_cli.training.loggers.base import Logger

LOGGERS = Registry(
    "logger",
    {
        "none": "mezo_cli.training.loggers.base:NoLogger",
        "tensorboard": "mezo_cli.training.loggers.tensorboard:TensorBoardLogger",
        "wandb": "mezo_cli.training.loggers.wandb:WandbLogger",
    },
)


def make_logger(config: LoggerConfig, run_dir: Path) -> Logger:
    """Return the logger that the config names.

    Raises:
        UserError: when its package is not installed.
    """
    logger: Logger = LOGGERS.load(config.name)(config, run_dir)
    return logger
