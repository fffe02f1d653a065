"""Config files of a `--config-dir` and of plug-ins: why Hydra cannot read or merge one, with its file and line.

Such a folder is the user's own, as with any Hydra program: nothing that it may contain is forbidden.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from mezo_cli.config.choices import Choices, conf_dir
from mezo_cli.config.keys import all_keys, allowed_values
from mezo_cli.errors import UserError

NOT_READ = ("config.yaml", "mezo_schema.yaml")  # the built-in ones are read instead


def check_folder(folder: Path) -> None:
    """Check that the user's folder has no file that Hydra would ignore."""
    for name in NOT_READ:
        if (folder / name).exists():
            raise UserError(
                f"{folder / name}: mezo has a {name} of its own and does not read this one: move its settings to "
                f"{folder / 'experiment' / 'NAME.yaml'} (first line '# @package _global_') and give experiment=NAME"
            )


def problems(choices: Choices) -> Iterator[str]:
    """Yield why files that are not built in cannot be read or merged: Hydra refuses them where they are chosen."""
    for group, files in choices.items():
        for path in files.values():
            if path.is_relative_to(conf_dir()):
                continue
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError, YAMLError) as error:
                yield from _why_unreadable(path, error)
            else:
                yield from _why_unlike_schema(path, group, content)


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


def _why_unlike_schema(path: Path, group: str, content: Any) -> Iterator[str]:
    """Yield where a file has a list in place of a mapping, or the other way round: Hydra cannot merge that."""
    if not isinstance(content, Mapping):
        yield f"{path}: expected a mapping of keys to values, not a {_kind(content)}"
        return
    text = path.read_text(encoding="utf-8")
    parent = "" if re.search(r"^\s*#\s*@package _global_", text, re.MULTILINE) else f"{group}."
    for key, value in _nodes(content):
        expected = _expected(f"{parent}{key}") if isinstance(value, (Mapping, list)) else None
        if expected and _kind(value) != expected.split()[0].rstrip(","):
            location = locate(path, text, key.split(".")[-1])
            yield f"{location}: {parent}{key}: expected a {expected}, not a {_kind(value)}"


def _nodes(content: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every node of nested mappings."""
    for key, value in content.items():
        yield f"{parent}{key}", value
        if isinstance(value, Mapping):
            yield from _nodes(value, f"{parent}{key}.")


def _expected(key: str) -> str | None:
    """Return what a known key takes, a list or a mapping; None for a single value and for an unknown key."""
    known = all_keys()
    if any(other.startswith(f"{key}.") for other in known):
        return "mapping of keys to values"
    examples: dict[Any, str] = {list: "list, e.g. [one, two]", dict: "mapping, e.g. {one: two}"}
    return examples.get(allowed_values(key).value_type) if key in known else None


def _kind(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping) else "list" if isinstance(value, list) else "single value"
