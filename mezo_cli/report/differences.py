"""Find the settings in which runs differ, and name the runs by them."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mezo_cli.report.settings import GRID, flatten_values, format_setting

Settings = Mapping[str, Any]  # by dotted key
# The same as another setting that is shown, in all or nearly all runs.
TWINS = {"data.seed": "seed", "model.name": "model.path"}


def flatten_stored(runs: Sequence[Mapping[str, Any]], default: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Return the settings of runs as config.yaml has them, nested, by dotted key; each has the keys of all.

    Args:
        runs: as `config.stored.read_settings` returns them: equal sections are the same object, flattened once.
        default: of a key that did not exist when a run was stored.
    """
    sections: dict[int, dict[str, Any]] = {}
    flat = [{name: value for name, value in run.items() if not isinstance(value, dict)} for run in runs]
    for run, one in zip(runs, flat, strict=True):
        for name, section in run.items():
            if isinstance(section, dict):
                if id(section) not in sections:
                    sections[id(section)] = flatten_values({name: section})
                one |= sections[id(section)]
    missing = {key: default(key) for key in dict.fromkeys(key for one in flat for key in one)}
    return [missing | one for one in flat]


def told_settings(runs: Sequence[Settings]) -> list[dict[str, Any]]:
    """Return of each run the settings that differ and say something of their own; None where a run has no such key."""
    every = dict.fromkeys(key for run in runs for key in run)
    filled = [{**every, **run} for run in runs]
    keys = telling_keys(filled, differing_keys(filled))
    return [{key: run[key] for key in keys} for run in filled]


def differing_keys(runs: Sequence[Settings]) -> list[str]:
    """Return the keys whose values are not the same in all runs, in the order of config.yaml."""
    keys = list(runs[0]) if runs else []
    return [key for key in keys if any(run.get(key) != runs[0][key] for run in runs)]


def telling_keys(runs: Sequence[Settings], keys: Sequence[str]) -> list[str]:
    """Return those of the differing keys that say something of their own.

    A setting of a choice that has one value wherever the choice is made follows from it (the template from the task),
    unless it is of the grid, which a reader looks for.
    """
    told = [key for key in keys if not (TWINS.get(key) and all(run[key] == run[TWINS[key]] for run in runs))]
    if "model.path" in told and "model.name" in told:
        told.remove("model.name")
    return [key for key in told if key in GRID or not _follows(key, runs, keys)]


def _follows(key: str, runs: Sequence[Settings], keys: Sequence[str]) -> bool:
    name = f"{key.partition('.')[0]}.name"
    if name == key or name not in keys:
        return False
    values = defaultdict(list)
    for run in runs:
        values[run[name]].append(run[key])
    return all(value == members[0] for members in values.values() for value in members)


def short_name(key: str) -> str:
    """Return a key as a column's title: `lr`, `data.shots`."""
    return format_setting(key, "").rstrip("=")
