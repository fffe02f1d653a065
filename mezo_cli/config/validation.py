"""Turn plain nested values into the frozen `Config`. Nothing here knows Hydra or YAML."""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Any

from mezo_cli.config.base import MISSING, SettingError, show
from mezo_cli.config.explain import is_group, readers, unknown_key, validate
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.rules import check_rules
from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError, join


def build(values: Mapping[str, Any], given: Collection[str] = ()) -> Config:
    """Return the config made of plain nested values. A key that is not given takes its default.

    Args:
        values: by group and key. A setting of a choice that was not made (`optimizer.momentum` with `optimizer.name:
            mezo`) is dropped.
        given: keys of which such a setting is refused: those of the command line.
    """
    groups = {group: choose(group, values.get(group, {}), given) for group in CHOICES}
    config = validate(Config, {**values, **groups})
    config = config if config.forwards is None else config.replace(steps=_steps_within(config, config.forwards))
    check_rules(config)
    return config


def choose(group: str, values: Any, given: Collection[str] = ()) -> Any:
    """Return the settings of a group, of the class of the choice that `name` makes; see `build`."""
    if not isinstance(values, Mapping):
        raise SettingError(group, f"{group}={show(values)}: expected a group of keys")
    name = values.get("name", "none" if group == "engine" else MISSING)
    if name == MISSING:
        raise SettingError(f"{group}.name", f"{group}.name is not set: give {group}=...")
    kind: Any = CHOICES[group].load(name)  # that of a plug-in is imported here, when its name is chosen
    base: Any = Config.model_fields[group].annotation
    if not is_group(kind) or not issubclass(kind, base):
        why = f"the plug-in {CHOICES[group].targets[name]} is no class of settings, which names its implementation"
        raise UserError(f"{group}={name}: {why} (docs/how-to/extending.md)")
    for key in values.keys() - kind.model_fields.keys():
        full, having = f"{group}.{key}", readers(group, key)
        if not having:
            raise unknown_key(full, [f"{group}.{known}" for known in kind.model_fields])
        if full in given:
            others = join(f"{group}={other}" for other in having)
            raise SettingError(full, f"'{full}={show(values[key])}': {group}={name} does not read it, only {others}")
    return validate(kind, {key: value for key, value in values.items() if key in kind.model_fields}, f"{group}.")


def defaults(names: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the default of every key as plain nested values; of the choices of groups, where their names are given."""
    chosen = {group: choose(group, {"name": name}) for group, name in names.items() if name in CHOICES[group].names}
    return Config().replace(**chosen).model_dump(serialize_as_any=True)


def _steps_within(config: Config, forwards: int) -> int:
    """Return the most steps whose forwards and backwards do not exceed `forwards`."""
    chosen, first = f"optimizer={config.optimizer.name}", config.calls(1, 1)
    if not first:
        raise SettingError("forwards", f"forwards={forwards}: {chosen} takes no step: leave it out")
    if first > forwards:
        why = f"a step of {chosen} takes {first} forwards"
        raise SettingError("forwards", f"forwards={forwards}: {why}: give {first} or more")
    return bisect_right(range(forwards + 1), forwards, key=lambda n: config.calls(n, n)) - 1
