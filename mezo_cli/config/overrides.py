"""Check the overrides of the command line one at a time, before anything is composed.

So an error line can name the key, what is allowed and the nearest spelling. Refused are keys and choices that do not
exist, settings that are removed, and Hydra's own settings other than its directories and launchers.
"""

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from mezo_cli.config.choices import Choices
from mezo_cli.config.explain import all_keys
from mezo_cli.errors import UserError, did_you_mean, join

HYDRA_DIRS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
HYDRA_CHOICES = {  # what may run a sweep, and the package that brings it
    "hydra/launcher": {
        "basic": None,
        "joblib": "hydra-joblib-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher",
        "ray": "hydra-ray-launcher",
    },
}
HYDRA_KEYS = (*HYDRA_DIRS, *HYDRA_CHOICES, "hydra.launcher.*")
NO_SWEEPERS = "a sweep is a grid, KEY=VALUE,VALUE (or hydra.sweeper.params of an experiment file); to search: mezo tune"


@dataclass(frozen=True)
class Override:
    """One override, parsed by Hydra's grammar."""

    text: str  # as it was given
    name: str  # the dotted key, or the group of a choice
    package: str | None  # of `task@PACKAGE=...`
    form: str  # Hydra's names: CHANGE for KEY=, ADD for +KEY=, FORCE_ADD for ++KEY=, DEL for ~KEY
    sweeps: bool  # it names several values
    value: Any  # None for a sweep
    values: tuple[str, ...] | None  # the value, or those of a sweep, as text; None where they cannot be enumerated
    jobs: tuple[str, ...]  # one override per value, as Hydra's own sweeper spells them


def check_form(text: str, choices: Choices) -> None:
    """Check that a text looks like an override at all."""
    if not re.match(r"(~|\+{0,2})[^=\s]+=|~[^=\s]+$", text):
        meant = [f"{group}={text}" for group, names in choices.items() if text in names]
        near = f" (did you mean {' or '.join(meant)}?)" if meant else ""
        raise UserError(f"'{text}' is not KEY=VALUE, e.g. task=rte or optimizer.lr=1e-5{near}")


def check_override(override: Override, choices: Choices) -> None:
    """Check that a choice exists, and that the form is allowed; whether a key exists is checked with its value."""
    name = override.name
    if name.startswith("hydra"):
        _check_hydra(override)
    elif name in choices:
        _check_choice(override, choices)
    elif override.form == "ADD" and name in all_keys():
        raise UserError(f"'{override.text}': {name} exists already; write {name}=...")
    elif override.form == "DEL" and name in all_keys():
        raise UserError(f"'{override.text}': a setting cannot be removed, only given a value: {name}=...")


def quote(value: object) -> str:
    """Return a text so that the override grammar reads it back unchanged."""
    text = str(value).replace("${", "\\${")
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)  # a quote is escaped, and so are the backslashes right before it
    return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"


def _check_hydra(override: Override) -> None:
    """Check one of Hydra's own keys: a directory, or the launcher with its settings."""
    text, key, value = override.text, override.name, override.value
    if key in HYDRA_CHOICES:
        _check_hydra_choice(override)
    elif key.startswith(("hydra/sweeper", "hydra.sweeper")):
        raise UserError(f"'{text}': {NO_SWEEPERS}")
    elif key not in HYDRA_DIRS and not key.startswith("hydra.launcher."):
        near = did_you_mean(key, HYDRA_KEYS)
        more = "; a folder of configs is given as --config-dir DIR" if key == "hydra.searchpath" else near
        raise UserError(f"'{text}': of Hydra's own keys only {join(HYDRA_KEYS)} can be set{more}")
    elif override.sweeps or override.form == "DEL":
        raise UserError(f"'{text}': {key} takes one value")
    elif key in HYDRA_DIRS and (value in ("", None) or str(value).startswith("~")):
        raise UserError(f"'{text}': {key} needs a folder; ~ is not expanded here, write {key}=$HOME/...")
    elif "_target_" in text:  # of the key, or of a mapping in the value
        why = "the code to run (_target_) cannot be set"
        raise UserError(f"'{text}': {why}; choose by hydra/launcher=")


def _check_hydra_choice(override: Override) -> None:
    """Check that a launcher is one of those that are known, and that its package is installed."""
    text, key = override.text, override.name
    known = HYDRA_CHOICES[key]
    if override.package is not None or override.form != "CHANGE" or override.value not in known:
        near = did_you_mean(str(override.value), known)
        raise UserError(f"'{text}': allowed is {key}= with one of {join(known)}{near}")
    package = known[override.value]
    if package is not None and not is_installed(package):
        raise UserError(f"'{text}': it is not installed: pip install {package}")


def is_installed(package: str) -> bool:
    """Return whether one of Hydra's plug-ins is there. It is located, not imported."""
    try:
        return importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}") is not None
    except ModuleNotFoundError:  # there is no hydra_plugins at all
        return False


def _check_choice(override: Override, choices: Choices) -> None:
    text, group = override.text, override.name
    allowed = join(sorted(choices[group])) or "none"
    if override.package is not None:
        raise UserError(f"'{text}': a choice cannot be moved to another key; write {group}=...")
    if override.form == "DEL":
        raise UserError(f"'{text}': a choice cannot be removed, only made: {group}=...; allowed: {allowed}")
    if override.form != "CHANGE":
        raise UserError(f"'{text}': {group} exists already; write {group}=...")
    if isinstance(override.value, list):
        raise UserError(f"'{text}': expected one choice; allowed: {allowed}")
    for value in override.values or ():
        if value not in choices[group]:
            near = did_you_mean(value, choices[group])
            raise UserError(f"{group}={value}: no such {group}{near}; allowed: {allowed}")
