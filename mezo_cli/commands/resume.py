"""`mezo resume`: continue an interrupted run, or a sweep. Of a run nothing can be changed but its end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezo_cli.commands.execute import broadcast_run, check_reward, check_shareable, execute
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.config.stored import (
    OwnCode,
    check_given_again,
    check_server_given,
    read_config,
    split_own_code,
    with_own_code,
)
from mezo_cli.config.validation import build
from mezo_cli.console import announce, print_line, relative_path, training_output
from mezo_cli.distributed.launch import check_command
from mezo_cli.distributed.ranks import Ranks, joined
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.rewards.spec import describe_change
from mezo_cli.runs.recovery import change_config
from mezo_cli.runs.run import ENDS, SWEEP, Run, is_sweep

KEYS = ("steps", "patience", "max_seconds", "at_limit", "stop_on_divergence")
WORDS = {"null": None, "true": True, "false": False}


def resume(
    path: Path,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    new_reward: bool = False,
    config_dir: str | None = None,
    jobs: int = 1,
) -> int:
    """Continue a run or a sweep, and return the exit status; a finished run is left as it is."""
    if is_sweep(path) and not (path / "config.yaml").exists():
        from mezo_cli.commands import sweep, tune  # they import Hydra

        check_command("resume SWEEP")
        if new_reward:
            raise UserError(f"--new-reward: {path} is a sweep; its runs are resumed with another reward one by one")
        if (path / SWEEP).is_file():
            return sweep.resume(path, overrides, config_dir, jobs, quiet)
        if jobs != 1:
            raise UserError(f"{path} is a search of `mezo tune`, which runs one trial after the other")
        return tune.resume(path, overrides, config_dir, quiet)
    for option, is_set in {"jobs": jobs != 1, "config-dir": config_dir}.items():
        if is_set:
            raise UserError(f"--{option}: {path} is no sweep; a run has its own settings, and is resumed without it")
    with joined() as ranks:
        resume_run(path, ranks, overrides, quiet, new_reward)
    return 0


def resume_run(
    path: Path, ranks: Ranks, overrides: Sequence[str] = (), quiet: bool = False, new_reward: bool = False
) -> None:
    """Continue a run, which the ranks share; a finished one is left as it is."""
    overrides, user_code = split_own_code(overrides)
    claimed = broadcast_run(ranks, _claim(path, overrides, user_code, quiet, new_reward) if ranks.is_first else None)
    if claimed is None:
        return
    run, new = claimed
    new = with_own_code(new, user_code)  # rank 0 does not send it
    if ranks.size > 1 and not ranks.split:
        check_shareable(new, ranks.size)
        ranks.start(new)
    was_finished = run.writes and run.status() == "finished"

    def prepare() -> None:
        config = read_config(run.path / "config.yaml")
        changed = [key for key in KEYS if getattr(config, key) != getattr(new, key)]
        if changed or was_finished:  # the summary of a finished one is put aside
            before, after = ({key: getattr(version, key) for key in changed} for version in (config, new))
            change_config(run, new, before, after)

    with training_output(quiet) as console:
        if quiet:
            announce(run.path.absolute())
        execute(run, new, console, prepare if run.writes else None)


def _claim(
    path: Path, overrides: Sequence[str], user_code: OwnCode, quiet: bool, new_reward: bool
) -> tuple[Run, Config] | None:
    """Claim a run; return it and its config with the new end. None for a finished run that has nothing left to do."""
    run = Run.open(path)
    config = run.contents().config
    new = with_own_code(with_new_end(run, config, overrides), user_code)
    info, finished = run.info(), run.status() == "finished"
    run.check_ends(info, (name for name in ENDS if (run.path / name).parent.is_dir()))
    if finished and config.optimizer.replayable:
        run.read_trajectory()
    run.completions()  # damage is told before anything is written
    stopped = info.get("stopped") or {}
    # One that `max_seconds` has ended continues where a limit is given, also the same again: each process has its own.
    is_given = any(text.startswith(("max_seconds=", "at_limit=")) for text in overrides)
    again = new != config or (is_given and stopped.get("by") == "max_seconds")
    if finished and not (again and stopped.get("step", config.steps) < new.steps):
        how = f" (stopped by {stopped['by']} at step {stopped['step']})" if stopped else ""
        print_line(relative_path(path.absolute()) if quiet else f"{path} is finished{how}: there is nothing to resume")
        return None
    check_given_again(f"{path} was trained", info, new)
    check_server_given(new)
    if (change := describe_change(new, info)) and not new_reward:
        raise UserError(f"{change}; --new-reward goes on with it")
    check_reward(new)
    run.claim(finished)
    return run, new


def with_new_end(run: Run, config: Config, overrides: Sequence[str]) -> Config:
    """Return the config of a run with other values of `KEYS`. Nothing is written."""
    changes: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or key not in KEYS:
            allowed = f"{join(f'{one}=...' for one in KEYS)}{did_you_mean(key, KEYS)}"
            raise UserError(f"'{text}': a resumed run keeps its settings, except when it ends: {allowed}")
        changes[key] = WORDS.get(value, value)
    if config.forwards is not None and "steps" in changes:
        raise UserError(f"steps={changes['steps']}: {run.path} has forwards={config.forwards}, which sets its steps")
    new = build({**to_dict(config), **changes})
    if new.log_interval != config.log_interval:  # lines are due from the first step on: log_every=null keeps its number
        new = new.replace(log_every=config.log_interval)
    if new.steps < config.steps:
        raise UserError(f"steps={new.steps}: {run.path} has steps={config.steps}, which can only be raised")
    shapes = {name: getattr(config.optimizer, name, "constant") for name in ("sample_schedule", "schedule")}
    tied = [f"optimizer.{name}={value}" for name, value in shapes.items() if value != "constant"]
    if new.steps > config.steps and tied:
        why = f"with {tied[0]} every step depends on steps={config.steps}"
        raise UserError(f"steps={new.steps}: {why}; start a new run")
    stopped, patience = run.info().get("stopped") or {}, config.patience
    if new != config and stopped.get("by") == "patience" and patience and new.patience and new.patience <= patience:
        raise UserError(f"{run.path} was stopped by patience={patience}: give patience=null, or a higher one")
    if new != config and stopped.get("by") == "divergence" and new.stop_on_divergence is not False:
        raise UserError(f"{run.path} was stopped because it diverged: give stop_on_divergence=false to continue it")
    return new
