"""Read the overrides of a command line by Hydra's grammar, and check each by itself, before anything is composed.

So an error line can name the key, what is allowed and the nearest spelling. Refused are choices that do not exist,
settings that are removed, and Hydra's own settings other than its directories and launchers. Whether a key exists is
checked with its value.
"""

import importlib.util
import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from mezo_cli.config.choices import Choices
from mezo_cli.config.explain import key_owners
from mezo_cli.errors import UserError, did_you_mean, join

HYDRA_DIRS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
LAUNCHER = "hydra/launcher"
LAUNCHERS = {  # what may run a sweep, and the package that brings it
    "basic": None,
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "ray": "hydra-ray-launcher",
}
HYDRA_KEYS = (*HYDRA_DIRS, LAUNCHER, "hydra.launcher.*")
NO_SWEEPERS = "a sweep is a grid, KEY=VALUE,VALUE (or hydra.sweeper.params of an experiment file); to search: mezo tune"
MAX_JOBS = 100_000  # of a sweep


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


def parse(overrides: Sequence[str], choices: Choices) -> list[Override]:
    """Return the overrides. `logger=[one,two]` becomes `logger.names`: Hydra would merge files, and lose names."""
    parser, parsed = OverridesParser.create(), []
    for word in overrides:
        if not re.match(r"(~|\+{0,2})[^=\s]+=|~[^=\s]+$", word):
            meant = [f"{group}={word}" for group, names in choices.items() if word in names]
            near = f" (did you mean {' or '.join(meant)}?)" if meant else ""
            raise UserError(f"'{word}' is not KEY=VALUE, e.g. task=rte or optimizer.lr=1e-5{near}")
        text = re.sub(r"^logger=\[", "logger.names=[", word)
        try:
            override = _converted(parser.parse_override(text), text, choices)
        except HydraException as error:
            name = re.split("[=@]", text.lstrip("~+"), maxsplit=1)[0]
            how = f"quote a value with special characters, '{name}=\"...\"'"
            value = text.partition("=")[2]
            if "{" in value and "'" not in value and '"' not in value:  # a template
                how = "quote it: " + shlex.quote(f'{name}="{value}"')
            if text.count("[") > text.count("]"):  # the shell has split it at a space
                how = f"quote a list with spaces for the shell, '{name}=[one, two]'"
            raise UserError(f"'{text}' cannot be read: {how}") from error
        if override.name.startswith("hydra"):
            _check_hydra(override)
        else:
            _check(override, choices)
        parsed.append(override)
    return parsed


def quote(value: object) -> str:
    """Return a text so that the override grammar reads it back unchanged."""
    text = str(value).replace("${", "\\${")
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)  # a quote is escaped, and so are the backslashes right before it
    return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"


def is_installed(package: str) -> bool:
    """Return whether one of Hydra's plug-ins is there. It is located, not imported."""
    try:
        return importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}") is not None
    except ModuleNotFoundError:  # there is no hydra_plugins at all
        return False


def _converted(override: Any, text: str, choices: Choices) -> Override:
    value, sweeps, element = override.value(), override.is_sweep_override(), override.get_key_element()
    values: list[str] | None = ["null" if value is None else str(value)]
    if isinstance(value, Glob):
        values = value.filter(list(choices.get(override.key_or_group, {})))
    elif sweeps:
        enumerable = override.is_discrete_sweep()
        values = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1)) if enumerable else None
    jobs = values or () if sweeps else (override.get_value_element_as_str(),)
    return Override(
        text=text,
        name=override.key_or_group,
        package=override.package,
        form=override.type.name,
        sweeps=sweeps,
        value=None if sweeps else value,
        values=None if values is None else tuple(values),
        jobs=tuple(f"{element}={job}" for job in jobs),
    )


def _check(override: Override, choices: Choices) -> None:
    text, name = override.text, override.name
    if name not in choices:
        if override.form in ("ADD", "DEL") and name in key_owners():
            raise UserError(f"'{text}': {name} exists already, and cannot be removed; write {name}=...")
        return
    allowed = join(sorted(choices[name])) or "none"
    if override.package is not None or override.form != "CHANGE" or isinstance(override.value, list):
        raise UserError(f"'{text}': one choice of each group is made; write {name}=..., allowed: {allowed}")
    for value in override.values or ():
        if value not in choices[name]:
            near = did_you_mean(value, choices[name])
            raise UserError(f"{name}={value}: no such {name}{near}; allowed: {allowed}")


def _check_hydra(override: Override) -> None:
    text, key, value = override.text, override.name, override.value
    if key.startswith(("hydra/sweeper", "hydra.sweeper")):
        raise UserError(f"'{text}': {NO_SWEEPERS}")
    if key not in HYDRA_KEYS and not key.startswith("hydra.launcher."):
        more = "; a folder of configs is given as --config-dir DIR" if key == "hydra.searchpath" else ""
        near = did_you_mean(key, HYDRA_KEYS)
        raise UserError(f"'{text}': of Hydra's own keys only {join(HYDRA_KEYS)} can be set{more or near}")
    if key == LAUNCHER:
        if override.package is not None or override.form != "CHANGE" or value not in LAUNCHERS:
            near = did_you_mean(str(value), LAUNCHERS)
            raise UserError(f"'{text}': allowed is {key}= with one of {join(LAUNCHERS)}{near}")
        package = LAUNCHERS[value]
        if package is not None and not is_installed(package):
            raise UserError(f"'{text}': it is not installed: pip install {package}")
    if override.sweeps or override.form == "DEL":
        raise UserError(f"'{text}': {key} takes one value")
    if key in HYDRA_DIRS and (value in ("", None) or str(value).startswith("~")):
        raise UserError(f"'{text}': {key} needs a folder; ~ is not expanded here, write {key}=$HOME/...")
