"""Config files of a `--config-dir` and of plug-ins: why Hydra cannot read or merge one, with its file and line.

Such a folder is the user's own, as with any Hydra program: nothing that it may contain is forbidden.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from mezo_cli.config.choices import Choices, conf_dir
from mezo_cli.errors import UserError

NOT_READ = "config.yaml"  # the built-in one is read instead


def check_folder(folder: Path) -> None:
    """Check that the user's folder has no file that Hydra would ignore."""
    if (folder / NOT_READ).exists():
        raise UserError(
            f"{folder / NOT_READ}: mezo has a {NOT_READ} of its own and does not read this one: move its settings to "
            f"{folder / 'experiment' / 'NAME.yaml'} (first line '# @package _global_') and give experiment=NAME"
        )


def problems(choices: Choices) -> Iterator[str]:
    """Yield why files that are not built in cannot be read or merged: Hydra refuses them where they are chosen."""
    for files in choices.values():
        for path in files.values():
            if path.is_relative_to(conf_dir()):
                continue
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError, YAMLError) as error:
                yield from _why_unreadable(path, error)
            else:
                if not isinstance(content, Mapping):
                    yield f"{path}: expected a mapping of keys to values"


def locate(path: Path, text: str, key: str) -> str:
    """Return `FILE:LINE` of the first line that names a key, or `FILE`."""
    leaf = re.compile(rf"[\s{{,-]*[\"']?{re.escape(key)}[\"']?\s*:")
    for number, line in enumerate(text.splitlines(), 1):
        if leaf.match(line):
            return f"{path}:{number}"
    return str(path)


def _why_unreadable(path: Path, error: Exception) -> Iterator[str]:
    """Yield why a file cannot be read, from the error: Hydra's own message has neither the file nor the line."""
    if isinstance(error, UnicodeDecodeError):
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        yield f"{path}:{line}: the file is not UTF-8; save it as UTF-8"
    elif isinstance(error, ReaderError):
        yield f"{path}: not YAML: {error.reason} (character {error.position + 1})"
    elif isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        yield f"{path}:{error.problem_mark.line + 1}: not YAML: {error.problem}"
