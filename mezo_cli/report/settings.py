"""Settings of runs: their part in a comparison, the paper's name of a method, defaults, differences, and as text.

Every setting has one of three parts:

- the grid: settings that the paper's search varies. Runs that differ only there compete for the best dev score.
- without effect on a result: where to log, how often to save.
- all others: they keep runs in different groups. A new key of the schema is one of these, so that runs are never
  mixed without notice.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from mezo_cli.config.choices import CONF, find_choices
from mezo_cli.config.explain import GROUPS, key_owners
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.config.validation import defaults
from mezo_cli.runs.contents import MARK, format_score, scale

Point = tuple[tuple[str, Any], ...]  # (key, value) of each setting of the grid
GRID = ("optimizer.lr", "optimizer.eps", "batch_size", "optimizer.weight_decay")
WITHOUT_EFFECT = (
    "logger.",
    "distributed.",
    "data.keep",
    "data.store_texts",
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
    return name if config.peft.name == "none" else f"{name} {config.peft.title or config.peft.name}"


def is_zero_shot(config: Config) -> bool:
    """Return whether the run uses no rows of train: no steps, no initialisation before them, no demonstrations."""
    return config.steps == 0 and config.init == "none" and not config.task.demonstrations


# --- by key ---


def flatten(values: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Return the settings in nested plain values by their dotted keys."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{parent}{name}"
        nested = isinstance(value, dict) and key not in key_owners()
        settings |= flatten(value, f"{key}.") if nested else {key: value}
    return settings


@cache
def matches(key: str, names: tuple[str, ...]) -> bool:
    """Return whether a key is one of the names or lies in one of the groups (`logger.`)."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def leave_out(settings: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings without some keys and groups of keys."""
    return {key: value for key, value in settings.items() if not matches(key, names)}


def parts(config: Config, settings: Mapping[str, Any]) -> tuple[Point, dict[str, Any]]:
    """Return the point of the grid, and the settings that all runs of a group have in common."""
    idle = OF_STEPS if config.steps == 0 else ()
    point = ((key, value) for key, value in settings.items() if key in GRID and not matches(key, idle))
    sources = [f"task.{source}." for source in ("hub", "files") if config.data.name != source]
    others = (*WITHOUT_EFFECT, *IN_OTHER_COLUMNS, *GRID, *idle, *sources)
    return tuple(point), leave_out(settings, others if config.at_limit != "stop" else (*others, *LIMIT))


# --- the defaults ---


def default_settings(config: Config) -> dict[str, Any]:
    """Return the default of every setting by its dotted key, given the choices that a run has made.

    A choice's values are those of its class and of its file over them; one of the user's own has no file here. The
    default of a choice's own name is the one of conf/config.yaml.
    """
    expected = flatten(defaults())
    for group, usual in _usual_choices().items():
        part = getattr(config, group)
        expected |= flatten(type(part)().model_dump(), f"{group}.")
        expected |= flatten(choice_values(group, getattr(part, "name", usual)), f"{group}.")
        expected[f"{group}.name"] = usual
    if config.model.dtype == "float32":  # as null is read
        expected["model.compute_dtype"] = "float32"
    if config.data.seed == config.seed:  # as composing sets it
        expected["data.seed"] = config.seed
    return expected


def changed_settings(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from their defaults, choices first: key -> value, default."""
    expected, values = default_settings(config), flatten(to_dict(config))
    changed = {key: {"value": v, "default": expected.get(key)} for key, v in values.items() if v != expected.get(key)}
    choices = {f"{group}.name": group for group in _usual_choices()}
    return {choices.get(key, key): changed[key] for key in sorted(changed, key=lambda key: key not in choices)}


def unusual_settings(config: Config, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's and adapter's settings that differ from the usual value: key -> usual value.

    The usual value is that of `usual`, else the choice's default (optimizer=adamw, peft=lora).
    """
    expected = default_settings(config) | dict(usual)
    # What else tells groups apart, or from the paper's rows, names the last three.
    skipped = (*GRID, *(OF_STEPS if config.steps == 0 else ()), "optimizer.name", "peft.name", "peft.head")
    return {
        key: expected.get(key)
        for key, value in leave_out(flatten(to_dict(config)), skipped).items()
        if key.startswith(("optimizer.", "peft.", "probe_c")) and value not in (None, expected.get(key))
    }


@cache
def _usual_choices() -> Mapping[str, str]:
    entries = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    choices = {name: choice for entry in entries if isinstance(entry, dict) for name, choice in entry.items()}
    return {name: choice for name, choice in choices.items() if name in GROUPS and choice}


@cache
def choice_values(group: str, name: str) -> Mapping[str, Any]:
    """Return the values in the file of a choice that is built in or of a plug-in; empty if there is none."""
    file = find_choices()[group].get(name)
    return {} if file is None else dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})


# --- differences between runs ---


def differing_keys(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all runs: None where a run has not the key."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [key for key in keys if any(run.get(key) != runs[0].get(key) for run in runs)]


def telling_keys(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return those of the differing keys that say something of their own; without effect only where no other differs.

    A setting of a choice that has one value wherever the choice is made follows from it (the template from the task),
    unless it is of the grid, which a reader looks for.
    """
    differing = differing_keys(runs)
    keys = [key for key in differing if not matches(key, WITHOUT_EFFECT)] or differing

    def follows(key: str) -> bool:
        name = f"{key.partition('.')[0]}.name"
        pairs = {(str(run.get(name)), str(run.get(key))) for run in runs} if name in keys and name != key else ()
        return len(pairs) == len({choice for choice, _ in pairs}) > 0

    same_seeds = all(run.get("data.seed") == run.get("seed") for run in runs)
    repeated = {"data.seed": same_seeds, "model.name": "model.path" in keys}
    return [key for key in keys if not repeated.get(key) and (key in GRID or not follows(key))]


# --- as text ---


def short_name(key: str) -> str:
    """Return a key in short: `lr`, `peft`, `data.shots`."""
    group, _, name = key.partition(".")
    return group if name == "name" else name if group in ("optimizer", "peft") else key


def format_setting(key: str, value: Any) -> str:
    """Return a setting in short: `noise=rademacher`, `lr=1e-06`."""
    return f"{short_name(key)}={format_value(value)}"


def format_value(value: Any) -> str:
    """Return a setting's value as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)


def shown_value(metric: str, value: float | None) -> float | None:
    """Return a metric's value as it is shown, rounded; None for none."""
    return None if value is None or math.isnan(value) else round(scale(metric) * float(value), 4)


def format_mean(metric: str, value: float | None, std: float | None = None, marked: bool = False) -> str:
    """Return a score as the paper prints it, `90.5 (1.2)`; `marked` if it is of the model before training."""
    if value is None or math.isnan(value):
        return "-"
    spread = "" if std is None else f" ({format_score(metric, std)})"
    return f"{format_score(metric, value)}{spread}{f' {MARK}' if marked else ''}"
