"""Turn plain values into the frozen `Config`: pydantic checks keys, types and ranges; a mistake is one line.

It is checked here, wherever the values come from: the command line, a YAML file, a run's own config.yaml. Nothing here
knows Hydra or YAML.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from mezo_cli.config.budget import with_budget
from mezo_cli.config.keys import check_key, children, is_group, type_hints
from mezo_cli.config.registry import CHOICES, NAMES, settings_class
from mezo_cli.config.rules import check_rules
from mezo_cli.config.schema import MISSING, Config, SettingError
from mezo_cli.config.values import SHOWN, allowed, plain_type, show
from mezo_cli.errors import did_you_mean, join

T = TypeVar("T")
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")  # pydantic's types of an error for an unknown key


def build(values: Any) -> Config:
    """Return the config made of plain nested values. A key that is not given takes its default.

    A setting of a choice that was not made (`optimizer.momentum` with `optimizer.name: mezo`) is dropped: a plug-in's
    may not be installed any more.
    """
    values = _mapping(values, "")
    groups = dict(values)
    for name, hint in type_hints(Config).items():
        if is_group(hint):
            groups[name] = build_group(hint, values.get(name, {}), name)
    config = with_budget(check(Config, groups))
    check_rules(config)
    return config


def build_group(base: type, values: Any, group: str) -> Any:
    """Return a group made of plain values, of the class of the choice that its `name` makes."""
    values = _mapping(values, group)
    if base not in CHOICES:
        return check(base, values, f"{group}.")
    name = values.get("name", default_of(base, "name"))
    own = type_hints(settings_class(base, name)) if name in CHOICES[base].names else {}
    for key in values:
        if key not in own:
            check_key(f"{group}.{key}")
    settings_type = settings_class(base, check_name(f"{group}.name", name))
    return check(settings_type, {key: value for key, value in values.items() if key in own}, f"{group}.")


def check(settings_type: type[T], values: Mapping[str, Any], parent: str = "") -> T:
    """Return a class of settings made of plain values; groups that are made already are taken as they are.

    Args:
        settings_type: the class, a dataclass.
        values: its fields by name.
        parent: what stands before a field's name in error lines: `optimizer.`.
    """
    fields = type_hints(settings_type)
    unset = {name: MISSING for name in fields if name not in values and default_of(settings_type, name) == MISSING}
    try:
        settings: T = _adapter(cast("Any", settings_type)).validate_python({**values, **unset})
    except ValidationError as error:
        raise _explain(settings_type, error, parent) from error
    for name in fields:
        if f"{parent}{name}" in NAMES and not allowed(fields[name]).choices:
            check_name(f"{parent}{name}", getattr(settings, name))
    return settings


def check_name(key: str, value: Any) -> Any:
    """Return a name, or a list of names, after looking them up in the table of the key."""
    for name in value if isinstance(value, list) else [value]:
        if name == MISSING:
            raise SettingError(key, f"{key} is not set: give {key}=...")
        known = NAMES[key].names
        if name not in known:
            raise SettingError(key, f"{key}={show(name)}: not one of {join(known)}{did_you_mean(str(name), known)}")
    return value


def defaults(settings_type: Any = Config) -> dict[str, Any]:
    """Return the defaults as plain nested values, `MISSING` where a value has to be given or follows from a choice."""
    values: dict[str, Any] = {}
    for name, hint in children(settings_type).items():
        if is_group(plain_type(hint)):
            values[name] = defaults(plain_type(hint))
        else:
            values[name] = MISSING if settings_type in CHOICES else default_of(settings_type, name)
    return values


def class_defaults(settings_type: Any) -> dict[str, Any]:
    """Return the defaults of a class of settings."""
    return {name: default_of(settings_type, name) for name in type_hints(settings_type)}


def default_of(settings_type: Any, name: str) -> Any:
    """Return the default of a field."""
    item: dataclasses.Field[Any] = settings_type.__dataclass_fields__[name]
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


@cache
def _adapter(settings_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(settings_type)


def _mapping(values: Any, group: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise SettingError(group, f"{group}={values}: expected a group of keys")
    return values


def _explain(settings_type: Any, error: ValidationError, parent: str) -> SettingError:
    """Return the first of pydantic's errors as a line that names the key, what was given and what is allowed."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] in UNKNOWN), errors[0])  # an unknown key may explain others
    node, path = settings_type, []
    for part in first["loc"]:  # down to the field; what follows is the place in a list or a mapping
        if not is_group(node) or part not in type_hints(node):
            break
        node = plain_type(type_hints(node)[str(part)])
        path.append(str(part))
    key, value = f"{parent}{'.'.join(path)}", first["input"]
    if value == MISSING:
        return SettingError(key, f"{key} is not set: give {key}=...")
    if first["type"] in UNKNOWN:
        check_key(f"{parent}{'.'.join(map(str, first['loc']))}")
    return SettingError(key, f"{key}{_reason(node, first['type'], value, key, first.get('ctx', {}))}")


def _reason(node: Any, error_type: str, value: Any, key: str, context: Mapping[str, Any]) -> str:
    takes = allowed(node)
    if error_type == SHOWN:
        return str(context["why"])
    if is_group(node):
        return f"={show(value)}: expected a group of keys"
    if takes.choices:
        if isinstance(value, bool):
            return f" holds the boolean {value}: YAML reads Yes, No, on and off as booleans, so quote the word"
        return f"={show(value)}: not one of {join(takes.choices)}{did_you_mean(str(value), takes.choices)}"
    if takes.value_type is bool:
        return f"={show(value)}: allowed are true, false{', null' if takes.optional else ''}"
    if takes.value_type is list:
        return f"={show(value)}: expected a list, e.g. {key}=[one,two]"
    if takes.value_type is dict:
        return f"={show(value)}: expected pairs, e.g. {key}={{one:two}}"
    outside = "" if error_type == "number" else "out of range, "
    return f"={show(value)}: {outside}allowed is {takes.describe()}"
