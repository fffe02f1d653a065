"""Check what a config file of the user (`--config-dir`) or of a plug-in contains. Such a file cannot run code.

Hydra instantiates what a config names: callbacks, log handlers, launchers. So a file may give settings of mezo's own
groups and `hydra.sweeper.params`, the grid of an experiment; all else under `hydra` is for the command line alone,
and so are `engine.python`, which names a program, `engine.url` and `engine.adapter_dir`, and a function as
`objective.reward`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from yaml import MarkedYAMLError
from yaml.reader import ReaderError

from mezo_cli.config.choices import Choices, conf_dir
from mezo_cli.config.keys import all_keys, allowed_values
from mezo_cli.config.own_code import why_not_from_file
from mezo_cli.errors import UserError, did_you_mean, join

ALLOWED = "of Hydra's own keys a config file may set only hydra.sweeper.params; give the others on the command line"
NOT_READ = ("config.yaml", "mezo_schema.yaml")  # the built-in ones are read instead


def check_folder(folder: Path) -> None:
    """Check that the user's folder has no file that Hydra would ignore, or take for one of its own."""
    for name in NOT_READ:
        if (folder / name).exists():
            raise UserError(
                f"{folder / name}: mezo has a {name} of its own and does not read this one: move its settings to "
                f"{folder / 'experiment' / 'NAME.yaml'} (first line '# @package _global_') and give experiment=NAME"
            )
    for path in sorted((folder / "hydra").rglob("*.yaml")):
        raise UserError(f"{path}: a config folder cannot contain settings of Hydra's own; {ALLOWED}")


def check_file(path: Path, group: str, content: Any, choices: Choices) -> None:
    """Check one file.

    Args:
        path: the file.
        group: its config group.
        content: its keys and values, as Hydra reads them; interpolations are not resolved.
        choices: the files of every group, which a defaults list may name.
    """
    if not isinstance(content, Mapping):
        return  # Hydra refuses it where it is chosen
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*#+\s*@\s*package\s*:?\s*(.*?)\s*$", line)
        if header and header[1] not in ("_global_", "_group_", group):
            raise UserError(f"{path}:{number}: '@package {header[1]}': allowed are _global_ and {group}")
    entries = content.get("defaults") or []
    if not isinstance(entries, list):
        raise UserError(f"{locate(path, text, 'defaults')}: defaults: expected a list, e.g. [_self_]")
    for entry in entries:
        _check_default(path, group, entry, choices)
    for key, value in content.items():
        if str(key).split(".")[0] == "hydra":
            _check_hydra(path, text, str(key), value)
    if group == "task":
        _check_label_lists(path, text, content)
    for key, value in _leaves(content):
        parts = key.split(".")
        for full in (key.removeprefix("hydra.sweeper.params."), f"{_parent(text, group)}{key}"):
            if why := why_not_from_file(full, value):
                raise UserError(f"{locate(path, text, full.rpartition('.')[2])}: {full}={value}: {why}")
        if "_target_" in parts:
            raise UserError(
                f"{locate(path, text, '_target_')}: {key}: a config file cannot name code to run (_target_)"
            )
        if value == "???":
            location = locate(path, text, parts[-1])
            raise UserError(f"{location}: {key}: ??? is no value: the default stands; give a value, or leave {key} out")
        name = _resolver(value) if isinstance(value, str) else None
        if name is not None:
            raise UserError(
                f"{locate(path, text, parts[-1])}: {key}: a config file cannot call ${{{name}:...}}, only refer to "
                f"other keys (${{seed}}); give {key} on the command line"
            )


def _check_label_lists(path: Path, text: str, content: Mapping[str, Any]) -> None:
    """Refuse spellings of the labels in a source that are not as many as the labels: none of them would be read."""
    labels = content.get("labels")
    for source in ("files", "hub"):
        other = content[source].get("labels") if isinstance(content.get(source), Mapping) else None
        if isinstance(labels, list) and isinstance(other, list) and other and len(other) != len(labels):
            raise UserError(
                f"{locate(path, text, source)}: {source}.labels has {len(other)} names for {len(labels)} labels: give "
                "one for each, in the order of the labels"
            )


def why_unreadable(path: Path, error: Exception) -> Iterator[str]:
    """Yield why a file cannot be read, from the error: Hydra's own message has neither the file nor the line."""
    if isinstance(error, UnicodeDecodeError):
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        yield f"{path}:{line}: the file is not UTF-8; save it as UTF-8"
    elif isinstance(error, ReaderError):
        yield f"{path}: not YAML: {error.reason} (character {error.position + 1})"
    elif isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        yield f"{path}:{error.problem_mark.line + 1}: not YAML: {error.problem}"
    elif isinstance(error, OSError) and error.errno is None:  # OmegaConf: a number or the like
        yield f"{path}: expected a mapping of keys to values, not a single value"


def why_unlike_schema(path: Path, group: str, content: Any) -> Iterator[str]:
    """Yield where a file has a list in place of a mapping, or the other way round: Hydra cannot merge that."""
    if not isinstance(content, Mapping):
        yield f"{path}: expected a mapping of keys to values, not a {_kind(content)}"
        return
    text = path.read_text(encoding="utf-8")
    parent = _parent(text, group)
    for key, value in _nodes(content):
        expected = _expected(f"{parent}{key}") if isinstance(value, (Mapping, list)) else None
        if expected and _kind(value) != expected.split()[0].rstrip(","):
            location = locate(path, text, key.split(".")[-1])
            yield f"{location}: {parent}{key}: expected a {expected}, not a {_kind(value)}"


def _parent(text: str, group: str) -> str:
    """Return what comes before the keys of a file: its group, or nothing in the package _global_."""
    return "" if re.search(r"^\s*#\s*@package _global_", text, re.MULTILINE) else f"{group}."


def is_built_in(path: Path) -> bool:
    """Return whether a file is one of mezo's own."""
    return path.is_relative_to(conf_dir())


def locate(path: Path, text: str, key: str) -> str:
    """Return `FILE:LINE` of the first line that names a key, or `FILE`."""
    leaf = re.compile(rf"[\s{{,-]*[\"']?{re.escape(key)}[\"']?\s*:")
    for number, line in enumerate(text.splitlines(), 1):
        if leaf.match(line):
            return f"{path}:{number}"
    return str(path)


def _check_hydra(path: Path, text: str, key: str, value: Any) -> None:
    """Refuse every key under `hydra` but `sweeper.params`."""
    for name, _ in _nodes({key: value}):
        if not f"{name}.".startswith("hydra.sweeper.params.") and name not in ("hydra", "hydra.sweeper"):
            raise UserError(f"{locate(path, text, name.split('.')[-1])}: {name}: {ALLOWED}")


def _check_default(path: Path, group: str, entry: Any, choices: Choices) -> None:
    """Check one entry of a defaults list: `_self_`, a choice of the file's group, or `[override] /GROUP: CHOICE`."""
    for key, value in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
        shown = f"{path}: defaults: '{key}: {value}'" if key else f"{path}: defaults: '{value}'"
        target = re.sub(r"^((override|optional)\s+)+", "", str(key)).strip()
        if not target and str(value).startswith("/"):
            target, _, value = str(value).rpartition("/")
        target = target.removeprefix("/") or group
        if target.split("/")[0].split("@")[0] == "hydra":
            raise UserError(f"{shown}: {ALLOWED}")
        if target not in choices:
            raise UserError(f"{shown}: allowed are the groups {join(choices)}{did_you_mean(target, choices)}")
        if value not in (None, "_self_") and str(value).removesuffix(".yaml") not in choices[target]:
            near = did_you_mean(str(value), choices[target])
            raise UserError(f"{shown}: no such {target}{near}; allowed is one of {join(sorted(choices[target]))}")


def _resolver(value: str) -> str | None:
    """Return the name of a resolver that a text calls (`${oc.env:HOME}`), None if it calls none.

    Escapes are read as if they were not there: what is escaped here may be resolved where the text goes.
    """
    text = value.replace("\\", "")
    reduced = None
    while reduced != text:  # take plain references out, the innermost first: ${a.${b}}
        reduced, text = text, re.sub(r"\$\{[^${}:]*\}", "", text)
    call = re.search(r"\$\{([^:]*):", text)
    return call[1].strip() if call else None


def _nodes(content: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every node of nested mappings."""
    for key, value in content.items():
        yield f"{parent}{key}", value
        if isinstance(value, Mapping):
            yield from _nodes(value, f"{parent}{key}.")


def _leaves(content: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf, entries of lists included."""
    if isinstance(content, (Mapping, list)) and content:
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            yield from _leaves(value, f"{parent}.{key}" if parent else str(key))
    else:
        yield parent, content


def _expected(key: str) -> str | None:
    """Return what a known key takes, a list or a mapping; None for a single value and for an unknown key."""
    known = all_keys()
    if any(other.startswith(f"{key}.") for other in known):
        return "mapping of keys to values"
    examples: dict[Any, str] = {list: "list, e.g. [one, two]", dict: "mapping, e.g. {one: two}"}
    return examples.get(allowed_values(key).value_type) if key in known else None


def _kind(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping) else "list" if isinstance(value, list) else "single value"
