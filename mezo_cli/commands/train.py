"""`mezo train`: one run."""

import sys
from collections.abc import Sequence

from mezo_cli.commands.execute import broadcast_run, check_new_run, check_shareable, execute
from mezo_cli.config import compose
from mezo_cli.config.stored import to_yaml
from mezo_cli.console import announce, json_at_end, log, relative_path, training_output
from mezo_cli.distributed.ranks import joined
from mezo_cli.runs.run import Run, describe_run


def train(overrides: Sequence[str], config_dir: str | None, quiet: bool = False, as_json: bool = False) -> None:
    """Compose the config, create the run directory and train; if `quiet`, print that directory and warnings only."""
    quiet = quiet or as_json
    with joined() as ranks, json_at_end(as_json) as told, training_output(quiet) as console:
        job = compose.load(overrides, config_dir)
        if ranks.size > 1:
            ranks.check_same("config", to_yaml(job.config))
            check_shareable(job.config, ranks.size)
            ranks.start(job.config)
        new = None
        if ranks.is_first:
            Run.check_free(job.directory)
            check_new_run(job.config)
            new = Run.create(job.directory, to_yaml(job.config), list(sys.argv)), job.config
        shared = broadcast_run(ranks, new)
        assert shared is not None
        run = shared[0]
        told[run.path] = lambda: describe_run(run.path)
        log.info("run    %s", relative_path(run.path))
        if quiet:  # which shows no such line
            announce(run.path)
        execute(run, job.config, console)  # the config of each rank has the user's own code, which none sends
