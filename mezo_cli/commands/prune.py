"""`mezo prune`: remove the full checkpoints of finished runs, after a replay that was bitwise identical to them."""

from pathlib import Path

from mezo_cli.console import console_logging, make_console, print_line, relative_path
from mezo_cli.errors import UserError
from mezo_cli.process.signals import import_torch
from mezo_cli.runs import Run, checkpoints, find_runs


class NothingToPruneError(UserError):
    """The run has no checkpoints that can be removed. Its text says why."""


def prune(folder: Path) -> None:
    """Prune a run, or every finished run under a folder, and print the bytes that were freed."""
    single = (folder / "config.yaml").is_file()
    runs = [Run(folder)] if single else find_runs(folder)
    if not runs:
        raise UserError(f"no runs under {folder}")
    freed, failed = 0, []
    for run in runs:
        try:
            size = _prune(Run.open(run.path))
            print_line(f"pruned  {relative_path(run.path)}: {size:,} bytes")
            freed += size
        except UserError as error:
            if single:
                raise
            print_line(f"kept    {error}")
            if not isinstance(error, NothingToPruneError):
                failed.append(run.path)
    print_line(f"{freed:,} bytes freed; the weights are replayed from the trajectory when they are needed")
    if failed:
        raise UserError(f"{len(failed)} of {len(runs)} runs could not be pruned, see above: {failed[0]}")


def _prune(run: Run) -> int:
    config = run.contents().config
    if not config.optimizer.replayable:
        what = f"optimizer={config.optimizer.name} writes no trajectory, so its checkpoints are all there is"
        raise NothingToPruneError(f"{run.path}: {what}")
    if (status := run.status()) != "finished":
        raise NothingToPruneError(f"{run.path} is {status}: only finished runs are pruned")
    steps = _stored_steps(run)
    if not steps and not run.pruned_checkpoints.exists():
        raise NothingToPruneError(f"{run.path} has no full checkpoints")
    import_torch()
    from mezo_cli import models
    from mezo_cli.session import restore
    from mezo_cli.session.opening import opened

    with run.locked(), console_logging(make_console()):
        if not (steps := _stored_steps(run)):  # the lock removes what a prune left that was killed
            return int((run.info().get("pruned") or {}).get("bytes", 0))
        stored = {}
        for name in steps:
            with opened(config, run, name) as session:
                stored[name] = models.fingerprint(session.loaded.model)
        with opened(config, run) as session:
            for step in restore.replayed(session, run, steps.values()):
                replayed = models.fingerprint(session.loaded.model)
                for name in steps:
                    if steps[name] == step and stored[name] != replayed:
                        what = f"a replay to step {step} gives other weights than checkpoints/{name}"
                        raise UserError(f"{run.path}: {what}; nothing was removed")
        return run.remove_checkpoints(steps)


def _stored_steps(run: Run) -> dict[str, int]:
    return {name: step for name in checkpoints.NAMES if (step := run.checkpoint_step(name)) is not None}
