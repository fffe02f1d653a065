"""The bridge to Hydra: overrides in, a checked frozen `Config` out. Only this room and the doors know Hydra.

Hydra composes plain nodes; the schema is laid over the result afterwards, so that types, unknown keys (also those
added with `+`) and ranges are all judged in one place and told in the same words.
"""

import dataclasses
import itertools
import math
import types
import typing
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mezo_cli.errors import UserError, did_you_mean, listed
from mezo_cli.schema import Config

VERSION_BASE = "1.3"


def conf_dir() -> Path:
    """Return the folder of the built-in configs: inside an installed package, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    return here / "conf" if (here / "conf").is_dir() else here.parent / "conf"


def register() -> None:
    """Tell Hydra the schema's defaults, so that every key can be overridden, and the run directory's unique part."""
    defaults = OmegaConf.to_container(OmegaConf.structured(Config), throw_on_missing=False)
    ConfigStore.instance().store(name="schema", node=defaults)
    OmegaConf.register_new_resolver("unique", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)


def search_path(config_dir: str | None) -> list[str]:
    """Return the override that puts the user's own config folder (`--config-dir`) before Hydra."""
    if config_dir is None:
        return []
    folder = Path(config_dir).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder")
    return [f"hydra.searchpath=[file://{folder}]"]


def check(overrides: Sequence[str], config_dir: str | None = None, multirun: bool = False) -> int:
    """Compose and check every job that `overrides` name, before any of them starts; return the number of jobs.

    Raises:
        UserError: with one line for the first override that does not hold.
    """
    groups = _groups(config_dir)
    parsed = [_parsed(text, groups) for text in overrides]
    sweeps = [o for o in parsed if o.is_sweep_override()]
    if sweeps and not multirun:
        raise UserError(f"'{sweeps[0].input_line}' names several values: add -m to sweep over them")
    choices = [_expanded(o) if o.is_sweep_override() else [o.input_line or ""] for o in parsed]
    first = [c[0] for c in choices]
    build(first, config_dir)
    # One job for each value of each key, not for each combination: checks stand on single keys.
    for i, alternatives in enumerate(choices):
        for other in alternatives[1:]:
            build([*first[:i], other, *first[i + 1 :]], config_dir)
    return math.prod(len(c) for c in choices)


def build(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Compose `overrides` over the defaults and return the checked config.

    Raises:
        UserError: for an unknown key or choice, a wrong type, a value out of range.
    """
    register()
    groups = _groups(config_dir)
    for text in overrides:
        _parsed(text, groups)
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base=VERSION_BASE):
            node = compose(config_name="config", overrides=[*search_path(config_dir), *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_first_line(error)) from error
    return typed(node)


def typed(node: DictConfig | Any) -> Config:
    """Lay the schema over a composed node, check types and ranges, and return it frozen.

    `data.seed`, when null, becomes the run's `seed`.
    """
    plain = OmegaConf.create(OmegaConf.to_container(node, resolve=False))
    assert isinstance(plain, DictConfig)
    plain.pop("hydra", None)
    for key in ("labels", "label_words"):
        _refuse_booleans(f"task.{key}", OmegaConf.select(plain, f"task.{key}"))
    try:
        merged = OmegaConf.merge(_writable(OmegaConf.structured(Config)), plain)
        for key in _missing(merged):
            raise UserError(f"{key} is not set: give {key}=...")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(_schema_line(error, plain)) from error
    assert isinstance(config, Config)
    check_ranges(config)
    if config.data.seed is None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, seed=config.seed))
    return config


def read(path: Path) -> Config:
    """Read a run's own `config.yaml` without composing again.

    Raises:
        UserError: when the file is missing or damaged; the line names it.
    """
    try:
        return typed(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # YAML has several error families; each means a damaged file
        raise UserError(f"{path} is damaged: {_first_line(error)}") from error


def to_yaml(config: Config) -> str:
    """Return the config as the text of `config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raise `UserError` for the first number outside its range or name outside its choices. nan and inf are outside."""
    for item in dataclasses.fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{key}.")
            continue
        choices = item.metadata.get("choices")
        if choices and value not in choices:
            raise UserError(f"{key}={value}: not one of {listed(choices)}{did_you_mean(str(value), choices)}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(key, value, **item.metadata)


def _check_number(
    key: str, value: float, low: float | None = None, above: float | None = None, high: float | None = None
) -> None:
    wanted = []
    if low is not None:
        wanted.append(f"at least {low:g}")
    if above is not None:
        wanted.append(f"above {above:g}")
    if high is not None:
        wanted.append(f"at most {high:g}")
    inside = math.isfinite(value)
    inside = inside and (low is None or value >= low) and (above is None or value > above)
    inside = inside and (high is None or value <= high)
    if not inside:
        raise UserError(f"{key}={value}: out of range, allowed is a finite number {' and '.join(wanted)}".rstrip())


def _refuse_booleans(key: str, values: Any) -> None:
    for value in values or []:
        if isinstance(value, bool):
            raise UserError(f"{key} holds the boolean {value}: YAML reads Yes and No as booleans, so quote the words")


def _writable(node: DictConfig) -> DictConfig:
    """Let values into a node made from frozen dataclasses; the object made of it in the end is frozen again."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _writable(child)
    return node


def _missing(merged: Any) -> Iterable[str]:
    return sorted(OmegaConf.missing_keys(merged))


# --- overrides, read one by one so that an error can name the key, what is allowed, and the nearest spelling ---


def _groups(config_dir: str | None) -> dict[str, list[str]]:
    """Return group -> its choices, over the built-in folder and the user's."""
    found: dict[str, set[str]] = {}
    for root in [conf_dir(), *([Path(config_dir).expanduser()] if config_dir else [])]:
        for path in sorted(root.glob("*/**/*.yaml")):
            relative = path.relative_to(root).with_suffix("")
            found.setdefault(relative.parts[0], set()).add("/".join(relative.parts[1:]))
    return {group: sorted(choices) for group, choices in found.items()}


def _parsed(text: str, groups: dict[str, list[str]]) -> Override:
    """Parse one override; check that its group and choices, or its key, exist."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(f"'{text}' is not KEY=VALUE: {_first_line(error)}") from error
    key = override.key_or_group
    if key.startswith("hydra"):
        return override
    if key in groups:
        for value in _expanded_values(override):
            if value not in groups[key] and value != "null":
                allowed = listed(groups[key])
                raise UserError(f"{key}={value}: no such {key}{did_you_mean(value, groups[key])}; allowed: {allowed}")
        return override
    _check_key(key, groups)
    return override


def _check_key(key: str, groups: dict[str, list[str]]) -> None:
    """Walk `key` down the schema; unknown parts name their siblings."""
    node: Any = Config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not dataclasses.is_dataclass(node):
            if typing.get_origin(node) in (dict, list):
                return
            raise UserError(f"{key}: {'.'.join(parts[:depth])} has no keys of its own")
        hints = typing.get_type_hints(node)
        if part not in hints:
            prefix = ".".join(parts[:depth])
            known = [f"{prefix}.{name}" if prefix else name for name in hints]
            known += [] if prefix else [g for g in groups if g not in hints]
            near = _nearest(key, ".".join(parts[: depth + 1]), known)
            raise UserError(f"unknown key '{key}'{near}; known{' under ' + prefix if prefix else ''}: {listed(known)}")
        node = _plain_type(hints[part])


def _nearest(key: str, upto: str, siblings: list[str]) -> str:
    """Suggest a sibling, or the one key anywhere that ends alike (`lr` for `optimizer.lr`), or a like spelling."""
    everywhere = _all_keys(Config)
    alike = [known for known in everywhere if known.endswith(f".{key}")]
    return did_you_mean(upto, siblings) or (did_you_mean(alike[0], alike) if alike else did_you_mean(key, everywhere))


def _all_keys(node: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(node).items():
        inner = _plain_type(hint)
        keys += _all_keys(inner, f"{prefix}{name}.") if dataclasses.is_dataclass(inner) else [f"{prefix}{name}"]
    return keys


def _plain_type(hint: Any) -> Any:
    """Strip `| None` from a type."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def _expanded(override: Override) -> list[str]:
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _expanded_values(override: Override) -> list[str]:
    if override.is_delete():
        return []
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    return [str(v) for v in value] if isinstance(value, list) else ["null" if value is None else str(value)]


def _schema_line(error: OmegaConfBaseException, node: DictConfig) -> str:
    """Say what the schema found wrong, with the key and the value that was given."""
    key = getattr(error, "full_key", None) or ""
    message = _first_line(error)
    if "not in 'Config'" in message or "not in '" in message:
        try:
            _check_key(key, {})
        except UserError as unknown:
            return str(unknown)
    value = OmegaConf.select(node, key) if key else None
    return f"{key}={value}: {message[0].lower()}{message[1:]}" if key else message


def _first_line(error: BaseException) -> str:
    """Return the innermost telling line of an error: Hydra wraps the cause and spreads it over several lines."""
    while isinstance(error.__cause__, (HydraException, OmegaConfBaseException)):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(itertools.islice(lines, 2)) if lines else type(error).__name__
