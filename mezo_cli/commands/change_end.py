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

KEYS = ("steps", "patience", "max_seconds")


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
        given[key] = None if value == "null" else value
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
    return new


def apply_new_end(run: Run, config: Config, new: Config) -> None:
    """Write the changed config into a run that this process has claimed; do nothing if it is the same."""
    changed = [key for key in KEYS if getattr(config, key) != getattr(new, key)]
    if changed:
        before, after = ({key: getattr(one, key) for key in changed} for one in (config, new))
        change_config(run, to_yaml(new), before, after)
