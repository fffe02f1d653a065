"""Find the choices of each config group (`task=...`, `model=...`), one YAML file each; complete them in a shell.

Looks in the built-in folder, in the folders of installed plug-ins and in the user's own (`--config-dir`), which is the
user's code as with any Hydra program. Imports nothing heavy: shell completion waits for the answer.
"""

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from mezo_cli.config.explain import GROUPS, key_owners
from mezo_cli.config.registry import CHOICES, LOGGERS, plug_ins
from mezo_cli.errors import UserError

Choices = dict[str, dict[str, Path]]  # group -> choice -> its file
PACKAGE = Path(__file__).resolve().parents[1]
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # in a checkout beside the package
NOT_READ = "config.yaml"  # the built-in one is read instead


@functools.cache
def plugin_dirs() -> tuple[Path, ...]:
    """Return the config folders of installed plug-ins: `PACKAGE/conf` of each package that registers an entry point.

    The packages are located, not imported.
    """
    folders = set()
    groups = {table.group for table in (*CHOICES.values(), LOGGERS)}
    for package in {point.module.partition(".")[0] for point in plug_ins(of_mezo=False) if point.group in groups}:
        spec = importlib.util.find_spec(package)
        folders |= {Path(location) / "conf" for location in (spec and spec.submodule_search_locations) or ()}
    return tuple(sorted(folder for folder in folders if folder.is_dir()))


def config_dirs(config_dir: str | None = None) -> list[Path]:
    """Return the folders that contain choices: the built-in one, those of plug-ins, the user's."""
    if config_dir is None:
        return [CONF, *plugin_dirs()]
    folder = Path(os.path.realpath(os.path.expanduser(config_dir)))  # unlike Path's, they raise nothing
    if not folder.is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder")
    if (folder / NOT_READ).exists():
        raise UserError(
            f"{folder / NOT_READ}: mezo has a {NOT_READ} of its own and does not read this one: move its settings to "
            f"{folder / 'experiment' / 'NAME.yaml'} (first line '# @package _global_') and give experiment=NAME"
        )
    return [CONF, *plugin_dirs(), folder]


def find_choices(config_dir: str | None = None) -> Choices:
    """Return the file of every choice of every group."""
    by_group: Choices = {group: {} for group in GROUPS}
    for folder in config_dirs(config_dir):
        for group, choices in by_group.items():
            for path in sorted((folder / group).rglob("*.yaml")):
                name = path.relative_to(folder / group).with_suffix("").as_posix()
                if name in choices:
                    raise UserError(f"{path}: {group}={name} is already defined by {choices[name]}; rename the file")
                choices[name] = path
    return by_group


# --- shell completion of overrides: the shell waits for the answer ---


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
