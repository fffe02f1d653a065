"""The keys of a config: which there are, what each takes, and the nearest to one that does not exist.

For overrides, error lines and shell completion.
"""

import dataclasses
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any

from mezo_cli.config.registry import CHOICES, classes
from mezo_cli.config.schema import Config, SettingError
from mezo_cli.config.values import Allowed, allowed, plain_type
from mezo_cli.errors import did_you_mean, join

ELSEWHERE = {  # the names of other programs -> the key
    "learning_rate": "optimizer.lr",
    "epsilon": "optimizer.eps",
    "epochs": "steps (of batch_size rows each)",
    "num_epochs": "steps (of batch_size rows each)",
    "max_steps": "steps",
    "num_steps": "steps",
    "bs": "batch_size",
    "model_name": "model (a name) or model.path (a hub id or a folder)",
}


def children(node: Any) -> dict[str, Any]:
    """Return the keys inside a group and their annotations; those of all choices where they depend on the choice."""
    hints = dict(type_hints(node))
    for settings_type in classes(node).values() if node in CHOICES else ():
        hints |= {key: hint for key, hint in type_hints(settings_type).items() if key not in hints}
    return hints


def type_hints(settings_type: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a class of settings."""
    return _type_hints(settings_type)


@cache
def _type_hints(settings_type: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(settings_type, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(settings_type)}


def is_group(node: Any) -> bool:
    """Return whether a type of the schema is a group of keys."""
    return dataclasses.is_dataclass(node)


def check_key(key: str, extra: Iterable[str] = ()) -> None:
    """Check that a dotted key exists. `extra` are further top-level names."""
    if key.removeprefix("optimizer.") in ELSEWHERE:
        raise SettingError(key, f"unknown key '{key}': here it is {ELSEWHERE[key.removeprefix('optimizer.')]}")
    node: Any = Config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        value_type = node if is_group(node) else allowed(node).value_type
        if value_type is dict:
            return
        if value_type is list:
            whole = ".".join(parts[:depth])
            raise SettingError(key, f"unknown key '{key}': a list is given whole, {whole}=[one,two]")
        if not is_group(node):
            raise SettingError(key, f"unknown key '{key}': {'.'.join(parts[:depth])} has no keys of its own")
        hints = children(node)
        if part not in hints:
            parent = ".".join(parts[:depth])
            known = [f"{parent}.{name}" if parent else name for name in hints] + ([] if parent else list(extra))
            under = f" under {parent}" if parent else ""
            everywhere = all_keys()
            alike = [other for other in everywhere if other.endswith(f".{key}")]  # `optimizer.lr` for `lr`
            near = did_you_mean(alike[0], alike) if alike else did_you_mean(".".join(parts[: depth + 1]), known)
            near = near or did_you_mean(key, everywhere)
            raise SettingError(key, f"unknown key '{key}'{near}; known{under}: {join(known)}")
        node = plain_type(hints[part])


def all_keys(node: Any = Config, parent: str = "") -> list[str]:
    """Return every dotted key that takes a value."""
    keys = []
    for name, hint in children(node).items():
        inner = plain_type(hint)
        keys += all_keys(inner, f"{parent}{name}.") if is_group(inner) else [f"{parent}{name}"]
    return keys


def groups() -> list[str]:
    """Return the names that choose a file: the schema's groups with a name of the choice, and `experiment`."""
    named = [
        name for name, hint in type_hints(Config).items() if is_group(hint) and {"name", "names"} & {*type_hints(hint)}
    ]
    return [*named, "experiment"]


def is_entry(key: str) -> bool:
    """Return whether a known key is an entry of a dict, such as `task.rename.sentence1`."""
    return key not in all_keys() and any(key.startswith(f"{known}.") for known in all_keys())


def allowed_values(key: str) -> Allowed:
    """Return what a known key, or the mapping that it is an entry of, takes."""
    node: Any = Config
    for part in key.split("."):
        hint = children(node)[part]
        node = plain_type(hint)
        if not is_group(node):
            return allowed(hint)
    return Allowed(node)
