"""What stands on the command line, read one override at a time.

Each is judged by itself, before Hydra composes, so that an error can name the key, what is allowed and the nearest
spelling. The grammar is Hydra's own (its parser is used); what a run cannot take is refused here: keys and choices
that are not there, removed keys, Hydra's settings other than its directories.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException

from mezo_cli.checks import check_key, container, groups, is_entry
from mezo_cli.errors import UserError, did_you_mean, listed

HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")

Choices = Mapping[str, Mapping[str, Path]]  # group -> choice -> its file


def choices_in(roots: Iterable[Path]) -> dict[str, dict[str, Path]]:
    """Return the choices of every group over the folders `roots`, the built-in one first.

    Raises:
        UserError: when two folders offer the same choice: one of them would be silently ignored.
    """
    found: dict[str, dict[str, Path]] = {group: {} for group in groups()}
    for root in roots:
        for group, choices in found.items():
            for path in sorted((root / group).rglob("*.yaml")):
                name = path.relative_to(root / group).with_suffix("").as_posix()
                if name in choices:
                    raise UserError(f"{path}: {group}={name} is built in already; give the file another name")
                choices[name] = path
    return found


def read(text: str, choices: Choices) -> Override:
    """Parse one override and check that its key, or its group and choice, exist.

    Raises:
        UserError: with one line that names what is allowed.
    """
    if not re.match(r"(~|\+{0,2})[^=\s]+=|~[^=\s]+$", text):
        raise UserError(f"'{text}' is not KEY=VALUE, e.g. task=rte or optimizer.lr=1e-5")
    key = re.split("[=@]", text.lstrip("~+"), maxsplit=1)[0]
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(f"'{text}' cannot be read: quote a value with special characters, '{key}=\"...\"'") from error
    if key.startswith("hydra"):
        _check_hydra(key, override)
    elif key in choices:
        _check_choice(key, override, choices[key])
    else:
        check_key(key, ["experiment"])
        (_check_entry if is_entry(key) else _check_setting)(key, override)
    return override


def alternatives(override: Override, choices: Choices) -> list[str]:
    """Return the overrides that a sweep over this one runs, one for each value; itself when it names one value.

    Raises:
        UserError: when it names no value at all.
    """
    if not override.is_sweep_override():
        return [override.input_line or ""]
    key = override.get_key_element()
    try:
        values = _values(override, choices.get(override.key_or_group, {}))
    except HydraException as error:
        raise UserError(f"'{override.input_line}' cannot be swept over: {error}") from error
    if not values:
        raise UserError(f"'{override.input_line}' names no value to sweep over")
    return [f"{key}={value}" for value in values]


def quoted(value: object) -> str:
    """Return a text so that the override grammar reads it back as it is."""
    return QuotedString(str(value).replace("${", "\\${"), Quote.single).with_quotes()


def _check_setting(key: str, override: Override) -> None:
    text, wanted = override.input_line, container(key)
    if override.is_delete():
        raise UserError(f"'{text}': a setting cannot be removed, only given a value: {key}=...")
    if override.is_add():
        raise UserError(f"'{text}': {key} is there already; write {key}=...")
    value = None if override.is_sweep_override() else override.value()
    if wanted is dict:
        raise UserError(f"'{text}': entries are given one at a time: +{key}.NAME=VALUE")
    if wanted is list and isinstance(value, dict):
        raise UserError(f"'{text}': a list is wanted, e.g. {key}=[one,two]")


def _check_entry(key: str, override: Override) -> None:
    if not (override.is_delete() or override.is_add() or override.is_force_add()):
        raise UserError(f"'{override.input_line}': write +{override.input_line} for a new entry, ++ to change one")


def _check_hydra(key: str, override: Override) -> None:
    if key not in HYDRA_KEYS:
        near = did_you_mean(key, HYDRA_KEYS)
        raise UserError(f"'{override.input_line}': of Hydra's own keys only {listed(HYDRA_KEYS)} can be set{near}")
    value = None if override.is_delete() else override.value()
    if value in ("", None):
        raise UserError(f"'{override.input_line}': {key} needs a folder")
    if isinstance(value, str) and value.startswith("~"):
        raise UserError(f"'{override.input_line}': neither the shell nor Hydra expands ~ here; write {key}=$HOME/...")


def _check_choice(group: str, override: Override, choices: Mapping[str, Path]) -> None:
    text, allowed = override.input_line, listed(sorted(choices)) or "none"
    if override.package is not None:
        raise UserError(f"'{text}': a choice has one place; write {group}=...")
    if override.is_delete():
        raise UserError(f"'{text}': a choice cannot be removed, only made: {group}=...; allowed: {allowed}")
    if override.is_add() or override.is_force_add():
        raise UserError(f"'{text}': {group} is there already; write {group}=...")
    if not override.is_sweep_override() and isinstance(override.value(), list):
        raise UserError(f"'{text}': one choice is wanted; allowed: {allowed}")
    for value in _values(override, choices):
        if value not in choices:
            raise UserError(f"{group}={value}: no such {group}{did_you_mean(value, choices)}; allowed: {allowed}")


def _values(override: Override, choices: Mapping[str, Path]) -> list[str]:
    """Return the value, or the values of a sweep, as text; a glob is matched against the choices."""
    if override.is_sweep_override():
        if isinstance(override._value, Glob):
            return list(override._value.filter(list(choices)))
        return list(override.sweep_string_iterator())
    value = override.value()
    return ["null" if value is None else str(value)]
