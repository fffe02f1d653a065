"""Sort a run's settings by their part in a comparison, name its method as the paper does, and find its defaults.

Every setting has one of three parts:

- the grid: settings that the paper's search varies. Runs that differ only there compete for the best dev score.
- without effect on a result: where to log, how often to save.
- all others: they keep runs in different groups. A new key of the schema is one of these, so that runs are never
  mixed without notice.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from mezo_cli.config.choices import CONF, find_choices
from mezo_cli.config.explain import GROUPS, key_owners
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.config.validation import defaults
from mezo_cli.objectives import LOSSES, METRICS, OBJECTIVES
from mezo_cli.runs.scores import MARK

GRID = ("optimizer.lr", "optimizer.eps", "batch_size", "optimizer.weight_decay")
NOT_IN_LABELS = ("peft.head",)  # what else tells groups apart, or from the paper's rows, names it
WITHOUT_EFFECT = (
    "logger.",
    "distributed.",
    "data.keep",
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


def method_name(config: Config) -> str:
    """Return the paper's name of the method: MeZO, MeZO LoRA, LP, FT, zero-shot, ICL, LP then MeZO."""
    name = config.optimizer.title or config.optimizer.name
    if config.steps == 0:
        name = "ICL" if config.task.demonstrations else "zero-shot" if is_zero_shot(config) else "LP"
    elif config.init == "linear_probe":
        name = f"LP then {name}"
    adapter = "" if config.peft.name == "none" else f" {config.peft.title or config.peft.name}"
    return name + adapter


def is_zero_shot(config: Config) -> bool:
    """Return whether the run uses no rows of train: no steps, no initialisation before them, no demonstrations."""
    return config.steps == 0 and config.init == "none" and not config.task.demonstrations


def objective_order(config: Config) -> tuple[int, int]:
    """Return the sort key of objective and loss: their order in the schema; an objective's own loss comes last."""
    loss, losses = config.objective.loss, LOSSES.names
    return OBJECTIVES.names.index(config.objective.name), losses.index(loss) if loss in losses else len(losses)


# --- the parts of settings ---


def flatten(config: Config) -> dict[str, Any]:
    """Return every setting by its dotted key."""
    return flatten_values(to_dict(config))


def flatten_values(values: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Return the settings in nested plain values by their dotted keys."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{parent}{name}"
        nested = isinstance(value, dict) and key not in key_owners()
        settings |= flatten_values(value, f"{key}.") if nested else {key: value}
    return settings


def unused(config: Config) -> tuple[str, ...]:
    """Return the settings that have no effect with the run's method."""
    return OF_STEPS if config.steps == 0 else ()


def matches(key: str, names: tuple[str, ...]) -> bool:
    """Return whether a key is one of the names or lies in one of the groups (`logger.`)."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def leave_out(settings: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings without some keys and groups of keys."""
    return {key: settings[key] for key in _others(tuple(settings), names)}


@cache
def _others(keys: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in keys if not matches(key, names))


# --- the defaults ---


def default_settings(config: Config) -> dict[str, Any]:
    """Return the default of every setting by its dotted key, given the choices that a run has made.

    A choice's values are those of its class and of its file over them. The default of a choice's own name is the one of
    conf/config.yaml; a choice without a file here, the user's own, is compared with that one.
    """
    expected = flatten_values(defaults())
    for group, usual in _usual_choices().items():
        part = getattr(config, group)
        if group in CHOICES:
            expected |= flatten_values(type(part)().model_dump(), f"{group}.")
        values = choice_values(group, getattr(part, "name", usual)) or choice_values(group, usual)
        expected |= {**flatten_values(values, f"{group}."), f"{group}.name": usual}
    if config.data.seed == config.seed:  # as composing sets it
        expected["data.seed"] = config.seed
    return expected


def changed_settings(config: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, value, default) of the settings that differ from their defaults; a choice by its group's key."""
    expected, values, unset = default_settings(config), flatten(config), _unset(config)
    changed = [
        (key, value, expected.get(key))
        for key, value in values.items()
        if value != expected.get(key) and not (key in unset and value == unset[key])
    ]
    choices = [f"{group}.name" for group in _usual_choices()]
    ordered = sorted(changed, key=lambda item: item[0] not in choices)
    return [(key.removesuffix(".name") if key in choices else key, value, usual) for key, value, usual in ordered]


def _unset(config: Config) -> dict[str, Any]:
    """Return the values that a choice of the user's own, which has no file here, has where nothing was set."""
    unset: dict[str, Any] = {}
    for group, usual in _usual_choices().items():
        part = getattr(config, group)
        if not choice_values(group, getattr(part, "name", usual)):
            unset |= flatten_values(type(part)().model_dump(), f"{group}.")
    return unset


def unusual_settings(config: Config, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's and adapter's settings that differ from the usual value: key -> usual value.

    The usual value is that of `usual`, else the choice's default (optimizer=adamw, peft=lora).
    """
    unusual, expected = {}, default_settings(config) | dict(usual)
    for key, value in flatten(config).items():
        of_method = key.startswith(("optimizer.", "peft.")) and not key.endswith(".name")
        if not of_method or value is None or matches(key, (*GRID, *NOT_IN_LABELS, *unused(config))):
            continue
        if value != expected.get(key):
            unusual[key] = expected.get(key)
    return unusual | ({"probe_c": None} if config.probe_c is not None else {})


@cache
def _usual_choices() -> Mapping[str, str]:
    """Return the choice of each group in conf/config.yaml."""
    entries = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    choices = {name: choice for entry in entries if isinstance(entry, dict) for name, choice in entry.items()}
    return {name: choice for name, choice in choices.items() if name in GROUPS and choice}


@cache
def choice_values(group: str, name: str) -> Mapping[str, Any]:
    """Return the values in the file of a choice that is built in or of a plug-in; empty if there is none."""
    file = find_choices()[group].get(name)
    return {} if file is None else dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})


# --- as text ---


def format_setting(key: str, value: Any) -> str:
    """Return a setting in short: `noise=rademacher`, `lr=1e-06`."""
    group, _, name = key.partition(".")
    if name == "name":
        name = group  # the choice: peft=lora
    elif group not in ("optimizer", "peft"):
        name = key
    return f"{name}={format_value(value)}"


@cache
def is_fraction(metric: str) -> bool:
    """Return whether a metric is shown in percent: those of labels are; a reward has a scale of its own."""
    return metric in METRICS.names


def scale(metric: str) -> int:
    """Return by what a metric's values are multiplied to be shown."""
    return 100 if is_fraction(metric) else 1


def shown_value(metric: str, value: float | None) -> float | None:
    """Return a metric's value as it is shown, rounded; None for none."""
    return None if value is None or math.isnan(value) else round(scale(metric) * float(value), 4)


def format_score(metric: str, value: float, sign: str = "") -> str:
    """Return a score in percent, with the `sign` behind it, or as it is."""
    return f"{100 * value + 0:.1f}{sign}" if is_fraction(metric) else f"{value + 0:.4g}"  # + 0: -0.0 is 0


def format_loss(value: float) -> str:
    """Return a loss with four digits, never `-0.0000`."""
    return f"{value:.4f}" if abs(value) >= 0.00005 else "0.0000"


def format_mean(metric: str, value: float | None, std: float | None = None, marked: bool = False) -> str:
    """Return a score as the paper prints it, `90.5 (1.2)`; `marked` if it is of the model before training."""
    if value is None or math.isnan(value):
        return "-"
    spread = "" if std is None else f" ({format_score(metric, std)})"
    return f"{format_score(metric, value)}{spread}{f' {MARK}' if marked else ''}"


def format_value(value: Any) -> str:
    """Return a setting's value as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)
