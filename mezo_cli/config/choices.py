"""Find the choices of each config group (`task=...`, `model=...`), one YAML file each.

Looks in the built-in folder, in the folders of installed plug-ins and in the user's own (`--config-dir`), which is the
user's code as with any Hydra program. Imports nothing heavy: shell completion (commands/completion.py) waits for it.
"""

import functools
import importlib.util
import os
from pathlib import Path

from mezo_cli.config.explain import GROUPS
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
