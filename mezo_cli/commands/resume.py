"""`mezo resume`: go on with an interrupted run, or with a sweep."""

import logging
from collections.abc import Sequence
from pathlib import Path

from mezo_cli.commands.change_end import apply_new_end, goes_on, with_new_end
from mezo_cli.commands.execute import announce, execute
from mezo_cli.commands.open_run import is_shared
from mezo_cli.commands.run_of_ranks import check_shareable, share_run
from mezo_cli.config.own_code import NOT_STORED, PYTHON, has_own_python, split_python, with_python
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import read_config
from mezo_cli.console import print_line, relative_path, training_output
from mezo_cli.distributed.join import joined
from mezo_cli.distributed.launch import check_command
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import UserError
from mezo_cli.optim import optimizer_class
from mezo_cli.runs import Run, completeness, sweep_record
from mezo_cli.system import import_torch

log = logging.getLogger("mezo")


def resume(
    path: Path,
    overrides: Sequence[str] = (),
    retry_failed: bool = False,
    from_sound_prefix: bool = False,
    quiet: bool = False,
) -> int:
    """Go on with a run or a sweep, and return the exit status; a finished run is left as it is.

    Args:
        path: the directory.
        overrides: of a run: when it ends, see change_end.py; with more steps a finished run goes on, too. Of a sweep:
            the launcher with its settings. Of both: `engine.python`, which is not stored.
        retry_failed: of a sweep: run its failed jobs again.
        from_sound_prefix: of a run with damaged files: go back to the last step before the damage.
        quiet: print the directory, warnings and errors only.

    Raises:
        UserError: for a directory that holds neither.
    """
    if sweep_record.exists(path) and not (path / "config.yaml").exists():
        from mezo_cli.commands import sweep  # imports Hydra

        check_command("resume SWEEP")
        if from_sound_prefix:
            raise UserError(f"--from-sound-prefix: {path} is a sweep; name one of its runs")
        return sweep.resume(path, overrides, retry_failed, quiet)
    if retry_failed:
        raise UserError(f"--retry-failed: {path} is no sweep; a failed run is resumed without it")
    if is_shared(path):
        raise UserError(f"{path} is a trajectory folder (mezo export --trajectory): it is used as it is, never resumed")
    with joined() as ranks:
        resume_run(path, ranks, overrides, from_sound_prefix, quiet)
    return 0


def resume_run(
    path: Path,
    ranks: Ranks | None,
    overrides: Sequence[str] = (),
    from_sound_prefix: bool = False,
    quiet: bool = False,
) -> None:
    """Go on with a run; a finished one is left as it is. See `resume`.

    Args:
        ranks: those that share the run; None if this process is alone.
    """
    before: list[tuple[Config, bool]] = []  # the config as it was, and whether the run goes on though it was finished

    def claim() -> tuple[Run, Config] | None:
        claimed = _claim(path, overrides, from_sound_prefix, quiet)
        if claimed is None:
            return None
        run, config, new, longer = claimed
        before.append((config, longer))
        return run, new

    shared = share_run(ranks, claim)
    if shared is None:
        return
    run, new = shared
    if ranks is not None and not ranks.split:
        check_shareable(new, ranks.size)
        ranks.start(new)

    def prepare() -> None:
        if from_sound_prefix and run.writes:
            import_torch()
            from mezo_cli.training import recovery

            recovery.cut_to_sound_prefix(before[0][0], run)
        if run.writes:
            apply_new_end(run, before[0][0], new, finished=before[0][1])

    with training_output(quiet) as console:
        if quiet:
            announce(run.path.absolute(), quiet)
        execute(run, new, console, prepare)


def _claim(
    path: Path, overrides: Sequence[str], from_sound_prefix: bool, quiet: bool
) -> tuple[Run, Config, Config, bool] | None:
    """Claim a run; return it, its config as it is and with the new end, and whether it goes on though it was finished.

    Returns None for a finished run that has nothing to go on with.
    """
    run = Run.open(path)
    config = read_config(path / "config.yaml")
    overrides, python = split_python(overrides)
    new = with_new_end(run, config, overrides)
    started = with_python(new, python)
    damage = _damage_at_end(run, config)
    if damage is not None and not from_sound_prefix:
        raise UserError(damage)
    finished = run.status() == "finished"
    longer = finished and goes_on(run, config, new, overrides)
    if finished and damage is None and not longer:
        stopped = run.info().get("stopped")
        by = {"pruned": "the pruner of its search"}.get(stopped["by"], stopped["by"]) if stopped else ""
        how = f" (stopped by {by} at step {stopped['step']})" if stopped else ""
        print_line(relative_path(path.absolute()) if quiet else f"{path} is finished{how}: there is nothing to resume")
        return None
    if run.info().get("own_engine_python") and not has_own_python(started):
        raise UserError(f"{path} was trained with an {PYTHON}, {NOT_STORED}")
    run.claim()
    return run, config, started, longer


def _damage_at_end(run: Run, config: Config) -> str | None:
    """Return what a finished run has lost of its summary or trajectory; None if it has all, or has not finished."""
    if run.status() != "finished":
        return None
    is_replayable = optimizer_class(config.optimizer).replayable
    try:
        completeness.check_whole(run, config.steps, is_replayable)
        if is_replayable:
            completeness.read_trajectory(run, log.warning)
    except UserError as error:
        has_rest = is_replayable and run.trajectory.is_file() and run.trajectory.stat().st_size
        return f"{error}{'; --from-sound-prefix goes back to the last sound step' if has_rest else ''}"
    return None
