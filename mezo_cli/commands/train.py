"""`mezo train`: one run, or the config that it would have."""

import logging
import sys
from collections.abc import Sequence

from mezo_cli.commands.execute import execute, relative
from mezo_cli.config import compose
from mezo_cli.config.stored import to_yaml
from mezo_cli.console import console_logging, make_console
from mezo_cli.runs import Run

log = logging.getLogger("mezo")


def show_config(overrides: Sequence[str], config_dir: str | None, what: str) -> None:
    """Print the composed config: `job`, `hydra` or `all`."""
    print(compose.show_config(overrides, config_dir, what), end="")


def train(overrides: Sequence[str], config_dir: str | None) -> None:
    """Compose the config, create the run directory and train."""
    job, console = compose.compose_run(overrides, config_dir), make_console()
    with console_logging(console):
        run = Run.create(job.directory, to_yaml(job.config), list(sys.argv))
        log.info("run    %s", relative(run.path))
        execute(run, job.config, console)
