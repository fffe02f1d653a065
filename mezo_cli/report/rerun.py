"""Say how a run was set up: the settings that differ from the defaults, and the commands that repeat and use it.

The defaults are those of conf/: its config.yaml chooses a file per group, and a file's values stand over the schema's.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from mezo_cli.config.choices import conf_dir, find_choices
from mezo_cli.config.keys import groups, type_hints
from mezo_cli.config.overrides import quote
from mezo_cli.config.registry import CHOICES, settings_class
from mezo_cli.config.schema import Config, data_dir
from mezo_cli.config.validation import class_defaults, defaults
from mezo_cli.optim import optimizer_class
from mezo_cli.report.settings import flatten, flatten_values, format_value

# A text like this means itself in an override; everything else is quoted.
PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_./][\w./-]*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Changed:
    """A setting that differs from its default. `default` is None for a choice that no built-in file makes."""

    key: str
    value: Any
    default: Any

    def texts(self) -> tuple[str, str, str]:
        """Return key, value and default as texts."""
        return self.key, format_value(self.value), format_value(self.default)


def changed_settings(config: Config) -> list[Changed]:
    """Return the settings that differ from the defaults: first the choices, then single settings."""
    usual, expected = _default_choices(), _expected(config)
    choices = [Changed(group, name, usual[group]) for group, name in _choices(config).items() if name != usual[group]]
    values = flatten(config).items()
    return choices + [Changed(key, value, expected.get(key)) for key, value in values if value != expected.get(key)]


def train_command(config: Config) -> str:
    """Return the command that trains with this config, in a new run directory."""
    return shlex.join(["mezo", "train", *(word for one in changed_settings(config) for word in _overrides(one))])


def commands(
    config: Config, location: str, status: str, best_step: int | None, resumable: bool = True
) -> list[tuple[str, str]]:
    """Return what can be done with a run, and the command for it.

    Args:
        config: its config.
        location: its directory.
        status: its status.
        best_step: the step of its best checkpoint; None before the first evaluation.
        resumable: False for a trajectory folder that someone shared.
    """
    run, optimizer = shlex.quote(location), optimizer_class(config.optimizer)
    # A folder that someone shared does not say where the files were.
    data = " data.dir=DIR" if config.data.name == "files" and data_dir(config.data) is None else ""
    found = [("Run again", f"{train_command(config)}{data}")]
    if resumable and status in ("interrupted", "failed"):
        found.append(("Resume", f"mezo resume {run}"))
    elif resumable and status == "finished" and config.steps and not optimizer.tied_to_steps(config.optimizer):
        found.append(("Train longer", f"mezo resume {run} steps={2 * config.steps}"))
    if optimizer.replayable and config.steps and best_step is not None:
        found.append(("Rebuild the weights of a step", f"mezo replay {run} --step {best_step} --out FOLDER"))
    if status == "finished":
        found.append(("Evaluate", f"mezo eval {run} --split test{data}"))
        found.append(("Export the model", f"mezo export {run} --out FOLDER"))
        found.append(("Predict a text of your own", _predict_command(config, run)))
    return found


def _predict_command(config: Config, run: str) -> str:
    columns = config.task.columns
    texts = ["..."] if len(columns) == 1 else [f"{column}=..." for column in columns]
    return " ".join([f"mezo predict {run}", *(f'--text "{text}"' for text in texts)])


# --- the defaults ---


@cache
def _default_choices() -> Mapping[str, str]:
    """Return the choice of each group in conf/config.yaml."""
    given = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    entries = [entry for entry in given if isinstance(entry, dict)]
    return {name: choice for entry in entries for name, choice in entry.items() if name in groups() and choice}


@cache
def _file_values(group: str, choice: str) -> Mapping[str, Any] | None:
    """Return the values in the file of a choice that is built in or of a plug-in; None if there is none."""
    file = find_choices()[group].get(choice)
    return None if file is None else dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})


def _choices(config: Config) -> dict[str, str]:
    """Return the choice of each group that a file makes. A choice of the user's own has none here: the default's."""
    found = {}
    for group, usual in _default_choices().items():
        name = getattr(getattr(config, group), "name", None)
        found[group] = name if name is not None and _file_values(group, name) is not None else usual
    return found


def _expected(config: Config) -> dict[str, Any]:
    """Return every setting's default, by dotted key, given the choices of the run's config."""
    nested: dict[str, Any] = defaults()
    for group, choice in _choices(config).items():
        kind = type_hints(Config)[group]
        values = class_defaults(settings_class(kind, choice)) if kind in CHOICES else nested[group]
        nested[group] = _merged(values, _file_values(group, choice) or {})
    if config.data.seed == config.seed:  # as composing sets it
        nested["data"]["seed"] = config.seed
    return flatten_values(nested)


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with those of `over` in their place, group by group."""
    found = dict(values)
    for key, value in over.items():
        before = found.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        found[key] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return found


# --- overrides ---


def _overrides(changed: Changed) -> Iterator[str]:
    """Yield the overrides that set a key; a mapping (task.rename) is set entry by entry."""
    key, value, default = changed.key, changed.value, changed.default
    if not isinstance(value, Mapping):
        yield f"{key}={_value(value)}"
        return
    before = default or {}
    yield from (f"~{key}.{name}" for name in before if name not in value)
    for name, entry in value.items():
        if before.get(name) != entry:
            yield f"++{key}.{name}={_value(entry)}"


def _value(value: Any) -> str:
    """Return a value so that the override grammar reads it back unchanged."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, (int, float)):
        return repr(value)
    return value if PLAIN.fullmatch(value) else quote(value)
