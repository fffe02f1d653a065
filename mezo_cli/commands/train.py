"""`mezo train`: one run, or the config that it would have."""

import sys
from collections.abc import Sequence

from mezo_cli.commands.execute import announce, execute
from mezo_cli.config import compose
from mezo_cli.config.stored import to_yaml
from mezo_cli.console import training_output
from mezo_cli.runs import Run


def show_config(overrides: Sequence[str], config_dir: str | None, what: str) -> None:
    """Print the composed config: `job`, `hydra` or `all`."""
    print(compose.show_config(overrides, config_dir, what), end="")


def train(overrides: Sequence[str], config_dir: str | None, quiet: bool = False) -> None:
    """Compose the config, create the run directory and train; if `quiet`, print that directory and warnings only."""
    job = compose.compose_run(overrides, config_dir)
    with training_output(quiet) as console:
        run = Run.create(job.directory, to_yaml(job.config), list(sys.argv))
        announce(run.path, quiet)
        execute(run, job.config, console)
