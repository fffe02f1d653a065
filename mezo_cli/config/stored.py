"""Read and write a run's `config.yaml`, and keep out of it what is the user's own, which is stored nowhere.

A stored config is complete and is never composed again: this needs no Hydra. Not stored is what runs a program of the
user's own, or says where weights and prompts go: `engine.python` names a program, `objective.reward` may name a
function, `engine.url` and `engine.adapter_dir` are addresses. They come from the command line, the Python API, the
environment or a `--config-dir`. A run, a sweep and an export are data and may be somebody else's: whoever goes on with
one gives them again.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mezo_cli.config.base import Own, SettingError, own_function
from mezo_cli.config.explain import key_owners, readers
from mezo_cli.config.registry import REWARDS
from mezo_cli.config.schema import Config, EngineConfig, to_dict
from mezo_cli.config.validation import build, check_rules
from mezo_cli.errors import UserError, join, one_line
from mezo_cli.process.environment import environment

REWARD = REWARDS.key
USED = "own_reward"  # of run.json: whether the run's process was given a function

# What the user has given to this process, by key, as `Own.find` returns it.
OwnCode = dict[str, Any]


def to_yaml(config: Config, whole: bool = False) -> str:
    """Return the config as the text of `config.yaml`; `whole`: with what is the user's own, to be shown."""
    import yaml  # not needed to say which keys there are

    return yaml.safe_dump(to_dict(config, whole), default_flow_style=False, allow_unicode=True, sort_keys=False)


def from_yaml(text: str) -> Config:
    """Return the config of `to_yaml`. The user's own code in it is ignored: it may be somebody else's."""
    return build(without_own_code(read_settings(text)))


def read_config(path: Path, text: str | None = None) -> Config:
    """Read a run's `config.yaml` and validate it; `text` is what is in it, if it was read already."""
    try:
        return from_yaml(path.read_text(encoding="utf-8") if text is None else text)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def is_same_run(stored: Config, job: Config) -> bool:
    """Return whether a stored config is that of a job, composed again; what is not stored does not count.

    A dtype of the forwards that the job leaves to the device was chosen when the run began, perhaps on another one.
    """
    again = from_yaml(to_yaml(job))
    if again.model.compute_dtype is None:
        again = again.replace(model=again.model.replace(compute_dtype=stored.model.compute_dtype))
    return again == stored


def read_settings(text: str) -> dict[str, Any]:
    """Return the settings in the text of a config.yaml as they were stored, nested, without validating them.

    For listing many runs: a top-level section is parsed once, and runs differ in few of them. `to_yaml` writes lines of
    a section indented, so a section begins where a line is not.
    """
    settings: dict[str, Any] = {}
    for section in re.split(r"^(?=[A-Za-z_])", text, flags=re.MULTILINE):
        settings |= _section(section)
    return settings


@functools.lru_cache(maxsize=4096)
def _section(text: str) -> dict[str, Any]:
    """Parse YAML by libyaml, which is 10 times faster.

    Aliases, with which few bytes can stand for millions of values, are refused: `to_yaml` writes none.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if "&" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=loader)):
            raise UserError("config.yaml is damaged: it has an alias")
        values = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"config.yaml is damaged: {one_line(error)}") from error
    if not isinstance(values, dict | None):
        raise UserError("config.yaml is damaged: it has no keys")
    return values or {}


# --- the user's own ---


@functools.cache
def own_keys() -> dict[str, Own]:
    """Return the keys whose fields are marked so."""
    owners = {key: (kind, key.rpartition(".")[2]) for key, kind in key_owners().items()}
    return {key: kind.own_fields()[name] for key, (kind, name) in owners.items() if name in kind.own_fields()}


def split_own_code(overrides: Sequence[str]) -> tuple[list[str], OwnCode]:
    """Return the overrides that may be stored, and of the others what they give. The last value of a key counts."""
    code, rest = OwnCode(), []
    for text in overrides:
        key, value = _setting(text)
        code.pop(key, None)
        mark = own_keys().get(key)
        found = mark and mark.find(value)
        if mark is None or found is None:
            rest.append(text)
        elif not value or "," in value or "${" in value:
            how = f"expected one value, without a comma or ${{...}}; or give it as {mark.variable}"
            raise UserError(f"'{text}': {how}")
        else:
            code[key] = found
    return rest, code


def check_stored(overrides: Iterable[str], source: Path) -> None:
    """Check overrides that a file has kept, a sweep's record: they are mezo's own keys, and none of them runs code."""
    for text in overrides:
        key, value = _setting(text)
        mark = own_keys().get(key)
        if key.startswith("hydra") or (mark and value is not None and ("${" in value or mark.find(value) is not None)):
            how = "take it out, and give it on the command line"
            raise UserError(f"{source}: '{text}' is not taken from a file: {how}")


def own_in(values: Mapping[str, Any]) -> OwnCode:
    """Return what in nested values is the user's own."""
    code = OwnCode()
    for key, mark in own_keys().items():
        group, name = key.split(".")
        part = values.get(group)
        if isinstance(part, Mapping) and (found := mark.find(part.get(name))) is not None:
            code[key] = found
    return code


def without_own_code(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested values in a file without what no run stores: the file may be somebody else's."""
    kept = dict(values)
    for key in own_in(values):
        group, name = key.split(".")
        kept[group] = {**kept[group], name: None}
    return kept


def with_own_code(config: Config, code: OwnCode) -> Config:
    """Return the config of a run, which is stored without it, with what the user has given again."""
    for key, value in code.items():
        group, name = key.split(".")
        part: Any = getattr(config, group)
        if not hasattr(part, name):
            others = join(f"{group}={other}" for other in readers(group, name))
            raise SettingError(key, f"{key}={value}: {group}={part.name} does not read it, only {others}")
        config = config.replace(**{group: part.replace(**{name: value})})
    if code:
        check_rules(config)
    return config


def own_code_used(config: Config) -> dict[str, bool]:
    """Return what run.json says of a run that uses a function that this process was given."""
    return {} if own_function(reward_of(config)) is None else {USED: True}


def check_given_again(what: str, info: Mapping[str, Any], config: Config) -> None:
    """Check that the function that a run was trained with, by its run.json, is given again."""
    if info.get(USED) and not own_code_used(config):
        why = f"which is not stored: give it again, {REWARD}=FILE.py:function or {own_keys()[REWARD].variable}"
        raise UserError(f"{what} with a function as {REWARD}, {why}")


def of_server(engine: EngineConfig, name: str) -> str:
    """Return what the user has given to this process for a field of an engine."""
    mark = type(engine).own_fields()[name]
    value = mark.or_variable(getattr(engine, name))
    if value is None:
        raise UserError(f"engine={engine.name} needs engine.{name} (or {mark.variable}), which is stored nowhere")
    return str(value)


def check_server_given(config: Config) -> None:
    """Check that an engine knows its server or its program, before anything is written."""
    for name in type(config.engine).own_fields():
        of_server(config.engine, name)


def reward_of(config: Config) -> Any:
    """Return `objective.reward`; where it is null, the one in the environment; None without any."""
    objective = config.objective
    return own_keys()[REWARD].or_variable(objective.reward) if hasattr(objective, "reward") else None


def for_workers(code: OwnCode) -> AbstractContextManager[None]:
    """Give what the user has given to the jobs of a sweep inside the block, in this process and those that it starts.

    They start in a working directory that `sweep.json` names: PYTHONSAFEPATH keeps modules there from being imported.
    """
    return environment({"PYTHONSAFEPATH": "1"} | {own_keys()[key].variable: value for key, value in code.items()})


def _setting(text: str) -> tuple[str, str | None]:
    """Return the key of an override, without `++` and without a package, and its value without quotes."""
    key, _, value = text.lstrip("+~").partition("=")
    value = re.sub(r"""^(["'])(.*)\1$""", r"\2", value.strip())
    return key.partition("@")[0].strip(), None if value == "null" else value
