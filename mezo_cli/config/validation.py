"""Turn plain values into the frozen `Config`: check keys, types and ranges, and report a mistake in one line.

The schema's dataclasses and the optimizers' settings say what is allowed. It is checked here, wherever the values come
from: the command line, a YAML file, a run's own config.yaml. Nothing here knows Hydra or YAML.
"""

import dataclasses
import math
import numbers
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from mezo_cli.config.keys import check_key, is_group, plain_type, type_hints
from mezo_cli.config.rules import check_rules
from mezo_cli.config.schema import MISSING, Config, OptimizerConfig, Owners, Setting, SettingError
from mezo_cli.errors import did_you_mean, join
from mezo_cli.objectives import LOSSES, OBJECTIVES
from mezo_cli.optim import OPTIMIZERS, all_settings
from mezo_cli.training.loggers import LOGGERS

CHOICES = {  # keys whose value is a name in a table
    "objective.name": OBJECTIVES,
    "objective.loss": LOSSES,
    "optimizer.name": OPTIMIZERS,
    "logger.names": LOGGERS,
}


def build(given: Any) -> Config:
    """Return the config made of plain nested values. A key that is not given takes its default.

    Raises:
        SettingError: for the first unknown key, wrong type, value out of range, or combination that is not allowed.
    """
    logger = given.get("logger") if isinstance(given, Mapping) else None
    if isinstance(logger, Mapping) and "name" in logger:
        given = {**given, "logger": with_logger_names(logger)}
    config = _build_group(Config, given, "")
    check_rules(config)
    return config


def with_logger_names(logger: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group `logger` with the `name` of earlier versions as `names`.

    Raises:
        SettingError: when it has both.
    """
    name, names = logger["name"], logger.get("names", [])
    if names:
        raise SettingError("logger.name", f"logger.name={name} and logger.names={names}: give logger.names alone")
    kept = {key: value for key, value in logger.items() if key != "name"}
    return {**kept, "names": [] if name == "none" else [name]}


def defaults(kind: Any = Config) -> dict[str, Any]:
    """Return the defaults as plain nested values, `MISSING` where a value has to be given."""
    if kind is OptimizerConfig:
        return {"name": MISSING} | {name: setting.default for name, setting in all_settings().items()}
    hints = type_hints(kind)
    return {
        item.name: defaults(hints[item.name]) if is_group(hints[item.name]) else default_of(item)
        for item in dataclasses.fields(kind)
    }


def default_of(item: "dataclasses.Field[Any]") -> Any:
    """Return the default of a dataclass's field."""
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


def _build_group(kind: Any, given: Any, prefix: str) -> Any:
    if not isinstance(given, Mapping):
        raise SettingError(prefix.rstrip("."), f"{prefix.rstrip('.')}={given}: expected a group of keys")
    for name in given:
        check_key(f"{prefix}{name}")
    if kind is OptimizerConfig:
        return _build_optimizer(given)
    hints = type_hints(kind)
    made = {}
    for item in dataclasses.fields(kind):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        inner = plain_type(hint)
        if is_group(inner):
            made[item.name] = _build_group(inner, given.get(item.name, {}), f"{key}.")
        else:
            limits = {name: limit for name, limit in item.metadata.items() if name != "of"}
            setting = Setting(item.name, hint, default_of(item), **limits)
            made[item.name] = check_value(key, given.get(item.name, setting.default), setting)
        _check_owner(key, made[item.name], made.get("name"), item.metadata.get("of"))
    return kind(**made)


def _build_optimizer(given: Mapping[str, Any]) -> OptimizerConfig:
    """Build the `optimizer` group, whose settings depend on the chosen optimizer."""
    name = check_value("optimizer.name", given.get("name", MISSING), Setting("name", str, MISSING))
    settings = all_settings(name)
    for key in given:
        if key not in ("name", *settings):  # of a plug-in that was not chosen
            read = join(setting.name for setting in OPTIMIZERS.load(name).settings)
            text = f"optimizer.{key}={_show(given[key])}: optimizer={name} does not read it; it reads {read}"
            raise SettingError(f"optimizer.{key}", text)
    values = {
        key: check_value(f"optimizer.{key}", given.get(key, setting.default), setting)
        for key, setting in settings.items()
    }
    return OptimizerConfig(name, values)


def _check_owner(key: str, value: Any, choice: str | None, owners: Owners | None) -> None:
    """Reject a setting that the group's choice does not have, and the lack of one that it needs."""
    if owners is None:
        return
    group = key.split(".")[0]
    if choice in owners.choices:
        if owners.required and value is None:
            raise SettingError(key, f"{key} is not set: {group}={choice} needs it")
    elif value is not None:
        only = " and ".join(f"{group}={one}" for one in owners.choices)
        raise SettingError(key, f"{key}={_show(value)}: {group}={choice} has no such setting, only {only}")


def check_value(key: str, value: Any, setting: Setting) -> Any:
    """Return one value in its type.

    Raises:
        SettingError: when it is not allowed; the text says what is.
    """
    kind = plain_type(setting.type)
    if value is None and kind is not setting.type:
        return None
    if value == MISSING:
        raise SettingError(key, f"{key} is not set: give {key}=...")
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise SettingError(key, f"{key}={_show(value)}: expected a list, e.g. {key}=[one,two]")
        return [_name(key, entry, CHOICES[key].names) if key in CHOICES else _text(key, entry) for entry in value]
    if typing.get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise SettingError(key, f"{key}={_show(value)}: expected pairs, e.g. {key}={{one:two}}")
        return {_text(key, name): _text(key, entry) for name, entry in value.items()}
    if kind is bool:
        if not isinstance(value, bool):
            allowed = "true, false" + ("" if kind is setting.type else ", null")
            raise SettingError(key, f"{key}={_show(value)}: allowed are {allowed}")
        return value
    if kind is str:
        return _name(key, value, CHOICES[key].names if key in CHOICES else setting.choices)
    return _number(key, value, kind, setting)


def _name(key: str, value: Any, choices: Sequence[str]) -> str:
    text = _text(key, value)
    if choices and text not in choices:
        raise SettingError(key, f"{key}={text}: not one of {join(choices)}{did_you_mean(text, choices)}")
    if not text:
        raise SettingError(key, f"{key} is empty: give a value, or leave {key} out")
    return text


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        raise SettingError(
            key, f"{key} holds the boolean {value}: YAML reads Yes, No, on and off as booleans, so quote the word"
        )
    if isinstance(value, float):  # the spelling is lost: 1e3 would come back as 1000.0
        raise SettingError(key, f"{key} holds the number {value}: expected a text, so quote it")
    if not isinstance(value, (str, int)):
        raise SettingError(key, f"{key} holds {_show(value)}: expected a text")
    return str(value)


def _number(key: str, value: Any, kind: Any, setting: Setting) -> Any:
    low, above, high = setting.low, setting.above, setting.high
    bounds = [("at least", low), ("above", above), ("at most", high)]
    allowed = " and ".join(
        f"{word} {bound:g}" if bound != high else f"{word} {bound}" for word, bound in bounds if bound is not None
    )
    wanted = f"a {'whole' if kind is int else 'finite'} number {allowed}".rstrip()
    number = _as_number(value, kind)
    if number is None:
        raise SettingError(key, f"{key}={_show(value)}: allowed is {wanted}")
    inside = math.isfinite(number) and (low is None or number >= low) and (above is None or number > above)
    if not inside or (high is not None and number > high):
        raise SettingError(key, f"{key}={_show(value)}: out of range, allowed is {wanted}")
    return number


def _as_number(value: Any, kind: Any) -> Any:
    """Return the value as an int or a float, None if it is neither. Texts (${oc.env:...}) and NumPy numbers count."""
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
        return None
    if kind is int and not isinstance(value, (numbers.Integral, str)):
        return None if math.isfinite(value) else value
    try:
        return kind(value)
    except (ValueError, OverflowError):
        return None


def _show(value: Any) -> str:
    return "null" if value is None else str(value)
