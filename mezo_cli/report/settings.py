"""Sort a run's settings by their part in a comparison, and name its method as the paper does.

Every setting has one of three parts:

- the grid: settings that the paper's search varies. Runs that differ only there compete for the best dev score.
- without effect on a result: where to log, how often to save.
- all others: they keep runs in different groups. A new key of the schema is one of these, so that runs are never
  mixed without notice.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mezo_cli.config.choices import conf_dir
from mezo_cli.config.keys import all_keys, type_hints
from mezo_cli.config.schema import Config, data_dir, to_dict
from mezo_cli.config.validation import default_of
from mezo_cli.objectives import LOSSES, OBJECTIVES
from mezo_cli.optim import optimizer_class
from mezo_cli.report.read import Entry, few_shot_folder

GRID = ("optimizer.lr", "optimizer.eps", "batch_size", "optimizer.weight_decay")
WITHOUT_EFFECT = (
    "logger.",
    "distributed.",
    "log_every",
    "test_at_start",
    "micro_batch_size",
    "eval_batch_size",
    "checkpoint",
    "checkpoint_every",
    "stop_on_divergence",
    "model.device",
)
LIMIT = ("max_seconds", "at_limit")  # without effect too, unless the run ends at the limit
# Shown by other columns: the model's path says more than its name; shots and seed may be the name of a folder.
IN_OTHER_COLUMNS = ("model.name", "seed", "data.seed", "data.shots")
OF_STEPS = ("optimizer.", "batch_size", "eval_every", "patience")  # without effect on a run of no steps

PEFT = {"none": "", "lora": " LoRA"}


def method_name(config: Config) -> str:
    """Return the paper's name of the method: MeZO, MeZO LoRA, LP, FT, zero-shot, LP then MeZO."""
    name = optimizer_class(config.optimizer).title or config.optimizer.name
    if config.steps == 0:
        name = "zero-shot" if is_zero_shot(config) else "LP"
    elif config.init == "linear_probe":
        name = f"LP then {name}"
    return name + PEFT.get(config.peft.name, f" {config.peft.name}")


def is_zero_shot(config: Config) -> bool:
    """Return whether the run learns nothing: no steps, and no initialisation before the first one."""
    return config.steps == 0 and config.init == "none"


def objective_order(config: Config) -> tuple[int, int]:
    """Return the sort key of objective and loss: their order in the schema."""
    return OBJECTIVES.names.index(config.objective.name), LOSSES.names.index(config.objective.loss)


def flatten(config: Config) -> dict[str, Any]:
    """Return every setting by its dotted key."""
    return flatten_values(to_dict(config))


def flatten_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings in nested plain values by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        nested = isinstance(value, dict) and key not in KEYS
        found |= flatten_values(value, f"{key}.") if nested else {key: value}
    return found


KEYS = frozenset(all_keys())


def grid_settings(config: Config) -> dict[str, Any]:
    """Return the run's point of the grid."""
    return {key: value for key, value in flatten(config).items() if key in GRID and not _matches(key, _unused(config))}


def group_settings(entry: Entry) -> dict[str, Any]:
    """Return the settings that all runs of a group share: those that are not of the grid and have an effect."""
    config = entry.config
    limit = LIMIT if config.at_limit == "stop" else ()
    excluded = (*WITHOUT_EFFECT, *limit, *IN_OTHER_COLUMNS, *GRID, *_unused(config))
    kept = {key: value for key, value in flatten(config).items() if not _matches(key, excluded)}
    for source in ("hub", "files"):
        if config.data.name != source:
            kept = {key: value for key, value in kept.items() if not key.startswith(f"task.{source}.")}
    if few_shot_folder(config) is not None:
        kept["data.dir"] = str(Path(str(data_dir(config.data))).parent)
    # A zero-shot run reads no training rows: only the kind of its test set counts.
    kept["data.shots"] = entry.shots if not is_zero_shot(config) else entry.shots is not None
    return kept


def unusual_settings(config: Config, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's and adapter's settings that differ from the usual value: key -> usual value.

    The usual value is that of `usual`, else of the built-in choice (optimizer=adamw, peft=lora), else the schema's
    default.
    """
    found = {}
    for group in ("optimizer", "peft"):
        part = getattr(config, group)
        choice = built_in_choice(group, part.name)
        for name in type_hints(type(part)):
            key, value = f"{group}.{name}", getattr(part, name)
            if name == "name" or value is None or key in GRID or _matches(key, _unused(config)):
                continue
            expected = usual.get(key, choice.get(name, default_of(type(part), name)))
            if value != expected:
                found[key] = expected
    return found | ({"probe_c": None} if config.probe_c is not None else {})


@cache
def built_in_choice(group: str, name: str) -> Mapping[str, Any]:
    """Return the values in the YAML of a built-in choice; empty if there is none of that name."""
    file = conf_dir() / group / f"{name}.yaml"
    return dict(yaml.safe_load(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _unused(config: Config) -> tuple[str, ...]:
    """Return the settings that have no effect with the run's method."""
    return OF_STEPS if config.steps == 0 else ()


def _matches(key: str, names: tuple[str, ...]) -> bool:
    """Return whether a key is one of the names or lies in one of the groups (`logger.`)."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def format_setting(key: str, value: Any) -> str:
    """Return a setting in short: `noise=rademacher`, `lr=1e-06`."""
    name = key.split(".", 1)[1] if key.startswith(("optimizer.", "peft.")) else key
    return f"{name}={format_value(value)}"


def format_value(value: Any) -> str:
    """Return a setting's value as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)
