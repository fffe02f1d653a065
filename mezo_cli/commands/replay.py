"""`mezo replay`: rebuild the weights of a step from the base model and the trajectory."""

from pathlib import Path

from mezo_cli.commands.open_run import open_run
from mezo_cli.console import console_logging, make_console, print_line
from mezo_cli.process.signals import import_torch
from mezo_cli.runs.atomic import check_new_folder, write_folder


def replay(path: Path, step: int, out: Path, base: Path | None) -> None:
    """Write the weights of `step` of a run to the folder `out`, in Hugging Face layout.

    `base` is the folder of the base model, in place of the run's own.

    Raises:
        UserError: when `out` is in use or cannot be written, and when the run cannot be replayed to that step.
        RunFailed: when the disk is full; nothing is left at `out`.
    """
    check_new_folder(out)
    import_torch()
    from mezo_cli import models
    from mezo_cli.training import restore

    with console_logging(make_console()):
        opened = open_run(path, str(step), base)
        session = restore.replay_from_base(opened.config, opened.run, step)
    write_folder(out, lambda folder: models.save(session.loaded, folder))
    print_line(f"step {step} of {path} written to {out}")
