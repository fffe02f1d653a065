"""Shell completion of overrides: keys, and the choices of a group. The shell waits for the answer: nothing heavy."""

import os
from typing import Any

from mezo_cli.config.choices import find_choices
from mezo_cli.config.explain import GROUPS, key_owners
from mezo_cli.errors import UserError


def complete(ctx: Any, incomplete: str) -> list[str]:
    """Return the words that `incomplete` can become.

    zsh and fish hand over the word as it is typed, `task=ss`. Bash splits at `=`: it hands over `ss`, the words before
    it are `task` and `=`, and it expects the part after the `=`.
    """
    start = ""  # what bash has split off
    if os.environ.get("_MEZO_COMPLETE") == "complete_bash":
        typed, here = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
        equals = [i for i in (here, here - 1) if typed[i : i + 1] == ["="]]
        start = f"{typed[equals[0] - 1]}=" if equals else ""
    words = _words(start + incomplete, ctx.params.get("config_dir"))
    return [word.removeprefix(start) for word in words if word.startswith(start + incomplete)]


def _words(incomplete: str, config_dir: str | None) -> list[str]:
    """Return every override that could be meant: keys while a key is typed, choices after a group's `=`."""
    group, equals, value = incomplete.partition("=")
    if equals:
        earlier = value[: value.rfind(",") + 1]  # of a sweep
        return [f"{group}={earlier}{name}" for name in _choices(group, config_dir)] if group in GROUPS else []
    keys = [*GROUPS, *(key for key in key_owners() if "." in incomplete or "." not in key)]
    keys = [key for key in keys if key.startswith(incomplete)]
    if len(keys) == 1 and keys[0] in GROUPS:  # several words, so that the shell puts no space after the `=`
        return [f"{keys[0]}={name}" for name in _choices(keys[0], config_dir)]
    return [f"{key}=" for key in keys]


def _choices(group: str, config_dir: str | None) -> list[str]:
    try:
        return sorted(find_choices(config_dir)[group])
    except UserError:  # a folder that does not exist, a choice defined twice: the command itself will say so
        return []
