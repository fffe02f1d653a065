"""`mezo resume RUN steps=N ...`: change when a stored run ends. Nothing that a step computes can be changed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mezo_cli.config.schema import Config, to_dict
from mezo_cli.config.stored import to_yaml
from mezo_cli.config.validation import build
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.optim import optimizer_class
from mezo_cli.runs import Run
from mezo_cli.runs.config_change import change_config

KEYS = ("steps", "patience", "max_seconds", "at_limit", "stop_on_divergence")
WORDS = {"null": None, "true": True, "false": False}


def with_new_end(run: Run, config: Config, overrides: Sequence[str]) -> Config:
    """Return the config of a run with other values of `KEYS`. Nothing is written.

    Raises:
        UserError: for another key, a value that is not allowed, fewer steps, or more steps where a step depends on
            their number.
    """
    given: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or key not in KEYS:
            raise UserError(
                f"'{text}': a resumed run keeps its settings, except when it ends: {join(f'{k}=...' for k in KEYS)}"
                f"{did_you_mean(key, KEYS)}"
            )
        given[key] = WORDS.get(value, value)
    new = build({**to_dict(config), **given})
    if new.log_interval != config.log_interval:  # lines are due from the first step on: log_every=null keeps its number
        new = dataclasses.replace(new, log_every=config.log_interval)
    if new.steps < config.steps:
        raise UserError(f"steps={new.steps}: {run.path} has steps={config.steps}, which can only be raised")
    tied = optimizer_class(config.optimizer).tied_to_steps(config.optimizer)
    if new.steps > config.steps and tied:
        raise UserError(
            f"steps={new.steps}: with {tied[0]} every step depends on steps={config.steps}; start a new run"
        )
    stopped, patience = run.info().get("stopped") or {}, config.patience
    if new != config and stopped.get("by") == "patience" and patience and new.patience and new.patience <= patience:
        raise UserError(f"{run.path} was stopped by patience={patience}: give patience=null, or a higher one")
    if new != config and stopped.get("by") == "divergence" and new.stop_on_divergence is not False:
        raise UserError(f"{run.path} was stopped because it diverged: give stop_on_divergence=false to go on with it")
    return new


def goes_on(run: Run, config: Config, new: Config, overrides: Sequence[str]) -> bool:
    """Return whether a finished run has steps left that its new end lets it take.

    One that `max_seconds` has ended goes on where a limit is given, also the same again: each process has its own.
    """
    limited = (run.info().get("stopped") or {}).get("by") == "max_seconds"
    again = limited and any(text.startswith(("max_seconds=", "at_limit=")) for text in overrides)
    return run.steps_at_end(config.steps) < new.steps and (new != config or again)


def apply_new_end(run: Run, config: Config, new: Config, finished: bool) -> None:
    """Write the changed config into a run that this process has claimed; put the summary of a finished one aside."""
    changed = [key for key in KEYS if getattr(config, key) != getattr(new, key)]
    if changed or finished:
        before, after = ({key: getattr(one, key) for key in changed} for one in (config, new))
        change_config(run, to_yaml(new), before, after)
