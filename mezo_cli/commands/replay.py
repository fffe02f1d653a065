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
    from mezo_cli.session import restore
    from mezo_cli.session.opening import opened

    with console_logging(make_console()):
        found = open_run(path, str(step), base)
        restore.require_trajectory(found.config, found.run, f"step {step}")
        with opened(found.config, found.run) as session:
            for _ in restore.replayed(session, found.run, [step]):
                restore.check_weights(session, found.run)
            write_folder(out, lambda folder: models.save(session.loaded, folder))
    print_line(f"step {step} of {path} written to {out}")
