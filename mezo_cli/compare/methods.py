"""What a run is called, and which of its settings tell it from others.

Every setting has one of three parts: the grid (what the paper's search varies: runs that differ only there compete for
the best dev score), what cannot change a result (where to log, how often to save), and all the rest, which keeps runs
apart. A key that is new in the schema is of the rest, so that nothing is ever mixed unseen.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mezo_cli import checks
from mezo_cli import config as configs
from mezo_cli.compare.collect import Entry, prepared_folder
from mezo_cli.schema import Config

GRID = ("optimizer.lr", "optimizer.eps", "batch_size", "optimizer.weight_decay")
WITHOUT_EFFECT = ("logger.", "log_every", "eval_batch_size", "checkpoint", "checkpoint_every", "model.device")
# Told by other columns: the model's path says more than its name, the split's shots and seed may be a folder's name.
TOLD_ELSEWHERE = ("model.name", "seed", "data.seed", "data.shots")
STEPPING = ("optimizer.", "batch_size", "eval_every")  # without effect on a run that takes no step

OPTIMIZERS = {
    "mezo": "MeZO",
    "mezo_momentum": "MeZO-momentum",
    "mezo_adam": "MeZO-Adam",
    "adamw": "FT",
    "sgd": "FT-SGD",
}
PEFTS = {"none": "", "lora": " LoRA"}


def method(config: Config) -> str:
    """Return the method's name as the paper has it: MeZO, MeZO LoRA, LP, FT, zero-shot, LP then MeZO."""
    name = OPTIMIZERS.get(config.optimizer.name, config.optimizer.name)
    if config.steps == 0:
        name = "zero-shot" if is_zero_shot(config) else "LP"
    elif config.init == "linear_probe":
        name = f"LP then {name}"
    return name + PEFTS.get(config.peft.name, f" {config.peft.name}")


def place(config: Config) -> tuple[int, int]:
    """Return the place of the objective and its loss in a table: the schema's order."""
    name, loss = (item.metadata["choices"] for item in dataclasses.fields(config.objective))
    return name.index(config.objective.name), loss.index(config.objective.loss)


def is_zero_shot(config: Config) -> bool:
    """Whether the run learns nothing: no step is taken, and nothing is done before the first one."""
    return config.steps == 0 and config.init == "none"


def flat(config: Config) -> dict[str, Any]:
    """Return every setting by its dotted key."""

    def walk(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            nested = isinstance(value, dict) and key not in KEYS
            found |= walk(value, f"{key}.") if nested else {key: value}
        return found

    return walk(dataclasses.asdict(config), "")


KEYS = frozenset(checks.all_keys())


def setting(config: Config) -> dict[str, Any]:
    """Return the run's point of the grid."""
    return {key: value for key, value in flat(config).items() if key in GRID and not _is(key, _unused(config))}


def recipe(entry: Entry) -> dict[str, Any]:
    """Return what keeps a run apart from others: all that is neither of the grid nor without effect."""
    config = entry.config
    out = (*WITHOUT_EFFECT, *TOLD_ELSEWHERE, *GRID, *_unused(config))
    kept = {key: value for key, value in flat(config).items() if not _is(key, out)}
    for source in ("hub", "files"):
        if config.data.name != source:
            kept = {key: value for key, value in kept.items() if not key.startswith(f"task.{source}.")}
    if prepared_folder(config) is not None:
        kept["data.dir"] = str(Path(str(config.data.dir)).parent)
    kept["data.shots"] = entry.shots if not is_zero_shot(config) else entry.shots is not None  # the test set's kind
    return kept


def unusual(config: Config, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the method's own settings that are not the usual ones, each with its usual value.

    `usual` comes first, then what the built-in choice (optimizer=adamw, peft=lora) has, then the schema's default.
    """
    found = {}
    for group in ("optimizer", "peft"):
        for item in dataclasses.fields(getattr(config, group)):
            key = f"{group}.{item.name}"
            value = getattr(getattr(config, group), item.name)
            if item.name == "name" or value is None or key in GRID or _is(key, _unused(config)):
                continue
            chosen = built_in(group, getattr(config, group).name)
            expected = usual.get(key, chosen.get(item.name, checks.default_of(item)))
            if value != expected:
                found[key] = expected
    return found | ({"probe_c": None} if config.probe_c is not None else {})


@cache
def built_in(group: str, name: str) -> Mapping[str, Any]:
    """Return the file of a built-in choice, empty where there is none of that name."""
    file = configs.conf_dir() / group / f"{name}.yaml"
    return dict(yaml.safe_load(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def told(key: str, value: Any) -> str:
    """Return a setting in short: `noise=rademacher`, `lr=1e-06`."""
    name = key.split(".", 1)[1] if key.startswith(("optimizer.", "peft.")) else key
    return f"{name}={number(value)}"


def number(value: Any) -> str:
    """Return a setting's value as a user would write it."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(number, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)


def _unused(config: Config) -> tuple[str, ...]:
    """Return the settings that the run's method does not read."""
    if config.steps == 0:
        return STEPPING
    names = (item.name for item in dataclasses.fields(config.optimizer))
    return tuple(f"optimizer.{name}" for name in names if name not in ("name", *config.method.reads))


def _is(key: str, names: tuple[str, ...]) -> bool:
    """Whether a key is one of the names, or lies in a group that is (`logger.`)."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)
