"""Shell completion of overrides: `task=` from the files in conf/ and the user's folder, and every key of the schema.

The shell waits for the answer, so nothing heavy is imported here.
"""

import os
from typing import Any

from mezo_cli.config.choices import find_choices
from mezo_cli.config.explain import GROUPS, all_keys
from mezo_cli.errors import UserError


def complete(ctx: Any, incomplete: str) -> list[str]:
    """Return the words that `incomplete` can become.

    zsh and fish hand over the word as it is typed, `task=ss`. Bash splits at `=`: it hands over `ss`, the words before
    it are `task` and `=`, and it expects the part after the `=`.
    """
    config_dir, key = ctx.params.get("config_dir"), _key_in_bash()
    start = f"{key}=" if key else ""
    words = [word for word in _words(start + incomplete, config_dir) if word.startswith(start + incomplete)]
    return [word.removeprefix(start) for word in words]


def _key_in_bash() -> str | None:
    """Return the key before the `=` that bash has split off, if it has."""
    if os.environ.get("_MEZO_COMPLETE") != "complete_bash":
        return None
    words = os.environ.get("COMP_WORDS", "").split("\n")
    here = int(os.environ.get("COMP_CWORD", "0"))
    equals = [i for i in (here, here - 1) if words[i : i + 1] == ["="]]
    return words[equals[0] - 1] if equals else None


def _words(incomplete: str, config_dir: str | None) -> list[str]:
    """Return every override that could be meant: keys while a key is typed, choices after a group's `=`."""
    group, equals, value = incomplete.partition("=")
    if equals:
        earlier = value[: value.rfind(",") + 1]  # of a sweep
        return [f"{group}={earlier}{name}" for name in _choices(group, config_dir)] if group in GROUPS else []
    keys = [*GROUPS, *(key for key in all_keys() if "." in incomplete or "." not in key)]
    keys = [key for key in keys if key.startswith(incomplete)]
    if len(keys) == 1 and keys[0] in GROUPS:  # several words, so that the shell puts no space after the `=`
        return [f"{keys[0]}={name}" for name in _choices(keys[0], config_dir)]
    return [f"{key}=" for key in keys]


def _choices(group: str, config_dir: str | None) -> list[str]:
    try:
        return sorted(find_choices(config_dir)[group])
    except UserError:  # a folder that does not exist, a choice defined twice: the command itself will say so
        return []
