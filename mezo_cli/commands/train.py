"""`mezo train`: one run, or the config that it would have."""

import sys
from collections.abc import Sequence

from mezo_cli.commands.execute import execute
from mezo_cli.commands.new_run import check_new_run
from mezo_cli.commands.ranks import broadcast_run, check_shareable
from mezo_cli.commands.resume import resume_run
from mezo_cli.config import compose
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import read_config, to_yaml
from mezo_cli.console import announce, training_output
from mezo_cli.distributed.launch import check_command
from mezo_cli.distributed.ranks import Ranks, joined
from mezo_cli.errors import UserError
from mezo_cli.runs import Run


def show_config(overrides: Sequence[str], config_dir: str | None, what: str) -> None:
    """Print the composed config: `job`, `hydra` or `all`."""
    print(compose.show_config(overrides, config_dir, what), end="")


def train(overrides: Sequence[str], config_dir: str | None, quiet: bool = False) -> None:
    """Compose the config, create the run directory and train; if `quiet`, print that directory and warnings only.

    Ranks that `torchrun` has started again continue the run that they began.
    """
    check_command("train", finds_run=any(text.startswith("hydra.run.dir=") for text in overrides))
    with joined() as ranks:
        job = compose.load(overrides, config_dir)
        if ranks.size > 1:
            ranks.check_same("config", to_yaml(job.config))
            check_shareable(job.config, ranks.size)
            ranks.start(job.config)
            if ranks.restarts and has_begun(job, ranks):
                resume_run(job.directory, ranks, quiet=quiet)
                return
        with training_output(quiet) as console:

            def create() -> tuple[Run, Config]:
                Run.check_free(job.directory)
                check_new_run(job.config)
                return Run.create(job.directory, to_yaml(job.config), list(sys.argv)), job.config

            created = broadcast_run(ranks, create)
            assert created is not None
            run = created[0]
            announce(run.path, quiet)
            execute(run, job.config, console)  # the config of each rank has the user's own code, which none sends


def has_begun(job: compose.Job, ranks: Ranks) -> bool:
    """Return whether rank 0 finds a run of this config in the job's directory: the ranks were started again."""
    if ranks.is_first:
        try:
            Run.check_free(job.directory)
            state = ""
        except UserError:
            state = "begun"
            if read_config(job.directory / "config.yaml") != job.config:
                raise
    return ranks.from_first(state if ranks.is_first else "") == "begun"
