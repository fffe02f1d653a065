"""From plain values to the frozen `Config`: keys, types and ranges, every mistake told in one line.

The schema's dataclasses say what is allowed; here it is enforced, whoever gave the values: the command line, a YAML
file, a run's own config.yaml. Nothing here knows Hydra or YAML.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from mezo_cli.errors import UserError, did_you_mean, listed
from mezo_cli.schema import MISSING, Config, OptimizerConfig


class SettingError(UserError):
    """A setting that does not hold; `key` is its dotted name."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def build(given: Any, kind: Any = Config, prefix: str = "") -> Any:
    """Return a `kind` (a dataclass of the schema) made of plain `given` values; what is not given keeps its default.

    Raises:
        SettingError: for the first unknown key, wrong type, or value out of range.
    """
    if not isinstance(given, Mapping):
        raise SettingError(prefix.rstrip("."), f"{prefix.rstrip('.')}={given}: a group of keys is wanted here")
    for name in given:
        check_key(f"{prefix}{name}")
    hints = typing.get_type_hints(kind)
    made = {}
    for item in dataclasses.fields(kind):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        inner = plain_type(hint)
        if dataclasses.is_dataclass(inner):
            made[item.name] = build(given.get(item.name, {}), inner, f"{key}.")
        else:
            made[item.name] = _value(key, given.get(item.name, default_of(item)), hint, item.metadata)
        _check_owner(key, made[item.name], made.get("name"), item.metadata.get("of"))
    return kind(**made)


def check_together(config: Config) -> None:
    """Refuse settings that hold each by itself but do not go together.

    Raises:
        SettingError: for the first pair.
    """
    method, chosen = config.method, f"optimizer={config.optimizer.name}"
    for item in dataclasses.fields(OptimizerConfig):
        key, value = f"optimizer.{item.name}", getattr(config.optimizer, item.name)
        # A method of no steps reads none of them: an experiment's settings for steps do no harm there.
        if method.reads and item.name not in ("name", *method.reads) and value != default_of(item):
            raise SettingError(
                key, f"{key}={_shown(value)}: {chosen} does not read it; it reads {listed(method.reads)}"
            )
    if config.checkpoint == "trajectory" and not method.trajectory:
        raise SettingError("checkpoint", f"checkpoint=trajectory: {chosen} leaves no trajectory; use checkpoint=full")
    window, scalar = config.optimizer.window, (config.optimizer.noise, config.optimizer.samples) == ("rademacher", 1)
    if config.optimizer.name == "mezo_adam" and window is not None and not scalar:
        raise SettingError(
            "optimizer.window",
            f"optimizer.window={window}: {chosen} has one number for its second moment only with optimizer.noise="
            "rademacher and optimizer.samples=1; otherwise its moments are stored: use optimizer.window=null",
        )
    loss = config.objective.loss
    if method.backward and loss != "cross_entropy":
        raise SettingError(
            "objective.loss", f"objective.loss={loss} has no gradient, and {chosen} needs one; use cross_entropy"
        )
    if config.optimizer.name == "linear_probe":
        if config.init != "linear_probe":
            raise SettingError("init", f"init={config.init}: optimizer=linear_probe needs init=linear_probe")
        if config.steps:
            other = "to train on from the probe, choose another optimizer and keep init=linear_probe"
            raise SettingError("steps", f"steps={config.steps}: optimizer=linear_probe takes no step: give 0; {other}")
    if config.probe_c is not None and config.init != "linear_probe":
        raise SettingError("probe_c", f"probe_c={config.probe_c:g}: only init=linear_probe reads it")
    if config.init == "linear_probe" and config.objective.name != "cls" and config.peft.name not in ("none", "head"):
        why = f"peft={config.peft.name} neither tunes nor saves the decoder that the probe is written into"
        raise SettingError("init", f"init=linear_probe: {why}; take peft=none or head, or objective=cls")


def _check_owner(key: str, value: Any, choice: str | None, owner: str | None) -> None:
    """Refuse a setting that the group's choice does not have, and the lack of one that it has."""
    group = key.split(".")[0]
    if owner and choice == owner and value is None:
        raise SettingError(key, f"{key} is not set: {group}={owner} needs it")
    if owner and choice != owner and value is not None:
        raise SettingError(key, f"{key}={_shown(value)}: {group}={choice} has no such setting, only {group}={owner}")


def default_of(item: Any) -> Any:
    """Return a field's default as a plain value."""
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


def check_key(key: str, extra: typing.Iterable[str] = ()) -> None:
    """Walk a dotted key down the schema; an unknown part names its siblings. `extra` are further top-level names.

    Raises:
        SettingError: for a key that the schema does not have.
    """
    node: Any = Config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if typing.get_origin(node) is dict:
            return
        if typing.get_origin(node) is list:
            whole = ".".join(parts[:depth])
            raise SettingError(key, f"unknown key '{key}': a list is given whole, {whole}=[one,two]")
        if not dataclasses.is_dataclass(node):
            raise SettingError(key, f"unknown key '{key}': {'.'.join(parts[:depth])} has no keys of its own")
        hints = typing.get_type_hints(node)
        if part not in hints:
            prefix = ".".join(parts[:depth])
            known = [f"{prefix}.{name}" if prefix else name for name in hints] + ([] if prefix else list(extra))
            under = f" under {prefix}" if prefix else ""
            near = _nearest(key, ".".join(parts[: depth + 1]), known)
            raise SettingError(key, f"unknown key '{key}'{near}; known{under}: {listed(known)}")
        node = plain_type(hints[part])


def all_keys(node: Any = Config, prefix: str = "") -> list[str]:
    """Return every dotted key of the schema that takes a value."""
    keys = []
    for name, hint in typing.get_type_hints(node).items():
        inner = plain_type(hint)
        keys += all_keys(inner, f"{prefix}{name}.") if dataclasses.is_dataclass(inner) else [f"{prefix}{name}"]
    return keys


def groups() -> list[str]:
    """Return the names that stand for a choice of file: the schema's groups, and `experiment`."""
    hints = typing.get_type_hints(Config)
    return [*(name for name, hint in hints.items() if dataclasses.is_dataclass(hint)), "experiment"]


def is_entry(key: str) -> bool:
    """Whether a known key lies inside a dict, such as `task.rename.sentence1`."""
    return key not in all_keys() and any(key.startswith(f"{known}.") for known in all_keys())


def container(key: str) -> type | None:
    """Return list or dict for a known key that takes one, None for every other."""
    node: Any = Config
    for part in key.split("."):
        node = plain_type(typing.get_type_hints(node)[part])
        if not dataclasses.is_dataclass(node):
            break
    return typing.get_origin(node)


def plain_type(hint: Any) -> Any:
    """Strip `| None` from a type."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def _nearest(key: str, upto: str, siblings: list[str]) -> str:
    """Suggest the one key anywhere that ends alike (`lr` for `optimizer.lr`), a sibling, or a like spelling."""
    everywhere = all_keys()
    alike = [known for known in everywhere if known.endswith(f".{key}")]
    return did_you_mean(alike[0], alike) if alike else did_you_mean(upto, siblings) or did_you_mean(key, everywhere)


def _value(key: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    """Return one value in its type; say what is allowed where it is not."""
    kind = plain_type(hint)
    if value is None and kind is not hint:
        return None
    if value == MISSING:
        raise SettingError(key, f"{key} is not set: give {key}=...")
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise SettingError(key, f"{key}={_shown(value)}: a list is wanted, e.g. {key}=[one,two]")
        return [_text(key, entry) for entry in value]
    if typing.get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise SettingError(key, f"{key}={_shown(value)}: pairs are wanted, e.g. {key}={{one:two}}")
        return {_text(key, name): _text(key, entry) for name, entry in value.items()}
    if kind is str:
        return _name(key, value, limits)
    return _number(key, value, kind, limits)


def _name(key: str, value: Any, limits: Mapping[str, Any]) -> str:
    text, choices = _text(key, value), limits.get("choices")
    if choices and text not in choices:
        raise SettingError(key, f"{key}={text}: not one of {listed(choices)}{did_you_mean(text, choices)}")
    if not text:
        raise SettingError(key, f"{key} is empty: give a value, or leave {key} out")
    return text


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        raise SettingError(
            key, f"{key} holds the boolean {value}: YAML reads Yes, No, on and off as booleans, so quote the word"
        )
    if isinstance(value, float):  # the spelling is lost: 1e3 would come back as 1000.0
        raise SettingError(key, f"{key} holds the number {value}: a text is wanted, so quote it")
    if not isinstance(value, (str, int)):
        raise SettingError(key, f"{key} holds {_shown(value)}: a text is wanted")
    return str(value)


def _number(key: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    low, above, high = (limits.get(name) for name in ("low", "above", "high"))
    bounds = [("at least", low), ("above", above), ("at most", high)]
    said = " and ".join(
        f"{word} {bound:g}" if bound != high else f"{word} {bound}" for word, bound in bounds if bound is not None
    )
    wanted = f"a {'whole' if kind is int else 'finite'} number {said}".rstrip()
    number = _as_number(value, kind)
    if number is None:
        raise SettingError(key, f"{key}={_shown(value)}: allowed is {wanted}")
    inside = math.isfinite(number) and (low is None or number >= low) and (above is None or number > above)
    if not inside or (high is not None and number > high):
        raise SettingError(key, f"{key}={_shown(value)}: out of range, allowed is {wanted}")
    return number


def _as_number(value: Any, kind: Any) -> Any:
    """Return the value as an int or a float, None where it is neither; texts count, for ${oc.env:...} gives them."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if kind is int and isinstance(value, float):
        return None if math.isfinite(value) else value
    try:
        return kind(value)
    except (ValueError, OverflowError):
        return None


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
