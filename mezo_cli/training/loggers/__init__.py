"""Loggers: where a run's scalars go besides metrics.jsonl. A logger is one module here and one row of `LOGGERS`."""

import importlib.util
from collections.abc import Iterable

from mezo_cli.config.registry import Registry
from mezo_cli.errors import UserError

LOGGERS = Registry(
    "logger",
    {
        "tensorboard": "mezo_cli.training.loggers.tensorboard:TensorBoardLogger",
        "wandb": "mezo_cli.training.loggers.wandb:WandbLogger",
        "trackio": "mezo_cli.training.loggers.trackio:TrackioLogger",
    },
)


def check_installed(names: Iterable[str]) -> None:
    """Check that the package of every logger is there. It is located, not imported.

    Raises:
        UserError: naming the logger and what to install.
    """
    for name in names:
        package = LOGGERS.load(name).package
        if importlib.util.find_spec(package) is None:
            raise UserError(f"logger={name} needs a package: pip install {package}")
