"""Find the choices of each config group (`task=...`, `model=...`): one YAML file per choice.

Looks in the built-in folder, in the folders of installed plug-ins and in the user's own (`--config-dir`). Imports
nothing heavy: shell completion waits for the answer.
"""

import functools
import importlib.util
from importlib import metadata
from pathlib import Path

from mezo_cli.config.explain import GROUPS
from mezo_cli.config.registry import CHOICES, LOGGERS
from mezo_cli.errors import UserError

Choices = dict[str, dict[str, Path]]  # group -> choice -> its file


def conf_dir() -> Path:
    """Return the folder of the built-in configs: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


@functools.cache
def plugin_dirs() -> tuple[Path, ...]:
    """Return the config folders of installed plug-ins: `PACKAGE/conf` of each package that registers an entry point.

    The packages are located, not imported.
    """
    folders = set()
    for group in filter(None, (table.group for table in (*CHOICES.values(), LOGGERS))):
        for point in metadata.entry_points(group=group):
            spec = importlib.util.find_spec(point.module.partition(".")[0])
            for location in (spec.submodule_search_locations or ()) if spec else ():
                folders.add(Path(location) / "conf")
    return tuple(sorted(folder for folder in folders if folder.is_dir()))


def config_dirs(config_dir: str | None = None) -> list[Path]:
    """Return the folders that contain choices: the built-in one, those of plug-ins, the user's."""
    folders = [conf_dir(), *plugin_dirs()]
    if config_dir is not None:
        try:
            folders.append(Path(config_dir).expanduser().resolve())
        except (RuntimeError, OSError) as error:  # a link that leads to itself, or an unknown user
            raise UserError(f"--config-dir {config_dir}: {error}") from error
        if not folders[-1].is_dir():
            raise UserError(f"--config-dir {config_dir}: no such folder")
        if "${" in str(folders[-1]):
            raise UserError(f"--config-dir {config_dir}: the path {folders[-1]} contains '${{'; rename the folder")
    return folders


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
