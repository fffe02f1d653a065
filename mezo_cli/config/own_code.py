"""What runs a program of the user's own, or says where weights and prompts go: it is stored nowhere.

`engine.python` names a program, `objective.reward` may name a function, `engine.url` and `engine.adapter_dir` say where
weights and prompts go. They come from the user: the command line, the Python API, the environment or a `--config-dir`.
A run, a sweep and an export are data and may be somebody else's: whoever goes on with one gives them again.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mezo_cli.config.base import SettingError
from mezo_cli.config.rules import check_rules
from mezo_cli.config.schema import Config, OpenAiConfig, VllmConfig
from mezo_cli.errors import UserError
from mezo_cli.system import environment

PYTHON = "engine.python"
VARIABLE = "MEZO_ENGINE_PYTHON"  # what engine.python=PATH says, for this process and those that it starts
URL, ADAPTER_DIR = "engine.url", "engine.adapter_dir"
VARIABLES = {PYTHON: VARIABLE, URL: "MEZO_ENGINE_URL", ADAPTER_DIR: "MEZO_ENGINE_ADAPTER_DIR"}

REWARD = "objective.reward"
REWARD_VARIABLE = "MEZO_REWARD"  # what objective.reward=FILE.py:function says, as VARIABLE
KEYS = {**VARIABLES, REWARD: REWARD_VARIABLE}
FIELDS = {PYTHON: "own_engine_python", REWARD: "own_reward"}  # of run.json and sweep.json: whether it was given
SHUFFLED = "shuffled:"  # before the name of a reward: the null control

# What the user has given to this process, by key: `engine.python` and `engine.adapter_dir`, absolute paths;
# `engine.url`; `objective.reward`, if it names a function, of an absolute path, or from Python is a callable.
OwnCode = dict[str, Any]


def is_own(key: str, value: Any) -> bool:
    """Return whether a value of a key is the user's own code or address, which no run, sweep or export stores."""
    if key == REWARD:
        return callable(value) or names_code(value)
    return key in VARIABLES and value is not None


def names_code(reward: Any) -> bool:
    """Return whether a reward is `FILE.py:function` or `package.module:function`, with `shuffled:` before it or not."""
    return isinstance(reward, str) and ":" in reward.removeprefix(SHUFFLED) and not reward.lstrip().startswith("{")


def split_own_code(overrides: Sequence[str]) -> tuple[list[str], OwnCode]:
    """Return the overrides that may be stored, and of the others what they give. The last value of a key counts."""
    own, rest = OwnCode(), []
    for text in overrides:
        key, value = _setting(text)
        own.pop(key, None)
        if not is_own(key, value):
            rest.append(text)
        elif not value or "," in value or "${" in value:
            raise UserError(f"'{text}': expected one value, without a comma or ${{...}}; or give it as {KEYS[key]}")
        else:
            own[key] = _absolute(key, value)
    return rest, own


def check_stored(overrides: Iterable[str], source: Path) -> None:
    """Check overrides that a file has kept, a sweep's record: they are mezo's own keys, and none of them runs code."""
    for text in overrides:
        key, value = _setting(text)
        interpolated = key in KEYS and value is not None and "${" in value
        if key.startswith("hydra") or interpolated or is_own(key, value):
            raise UserError(
                f"{source}: '{text}' is not taken from a file: take it out, and give it on the command line"
            )


def own_of(config: Config) -> OwnCode:
    """Return what in a config is the user's own."""
    values = {key: getattr(getattr(config, _group(key)), _name(key), None) for key in KEYS}
    return {key: value for key, value in values.items() if is_own(key, value)}


def with_own_code(config: Config, own: OwnCode) -> Config:
    """Return the config of a run, which is stored without it, with what the user has given again."""
    for key, value in own.items():
        part: Any = getattr(config, _group(key))
        if not hasattr(part, _name(key)):
            readers = {PYTHON: "vllm", REWARD: "generate"}
            why = f"{_group(key)}={part.name} does not read it, only {_group(key)}={readers.get(key, 'openai')}"
            raise SettingError(key, f"{key}={value}: {why}")
        config = _with(config, key, value)
    if own:
        check_rules(config)
    return config


def with_absolute_paths(config: Config) -> Config:
    """Return a config whose own code has absolute paths."""
    for key, value in own_of(config).items():
        config = config if callable(value) else _with(config, key, _absolute(key, value))
    return config


def without_own_code(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested values of a config without what is not stored."""
    kept = dict(plain)
    for key in KEYS:
        part = kept.get(_group(key))
        if isinstance(part, Mapping) and is_own(key, part.get(_name(key))):
            kept[_group(key)] = {**part, _name(key): None}
    return kept


def own_code_used(config: Config) -> dict[str, bool]:
    """Return which of `FIELDS` hold of a run: it uses a program or a function that this process was given."""
    own_python = isinstance(config.engine, VllmConfig) and bool(config.engine.python or os.environ.get(VARIABLE))
    used = {FIELDS[PYTHON]: own_python, FIELDS[REWARD]: is_own(REWARD, reward_of(config))}
    return {name: True for name, is_used in used.items() if is_used}


def check_given_again(what: str, before: Mapping[str, Any], used: Collection[str]) -> None:
    """Check that what a run or sweep used of the user's own code is given again: of `FIELDS`, `used` holds now."""
    shown = {PYTHON: ("an", "PATH"), REWARD: ("a function as", "FILE.py:function")}
    for key, (article, value) in shown.items():
        if before.get(FIELDS[key]) and FIELDS[key] not in used and not os.environ.get(KEYS[key]):
            why = f"which is not stored: give it again, {key}={value} or {KEYS[key]}"
            raise UserError(f"{what} with {article} {key}, {why}")


def of_server(engine: OpenAiConfig, key: str) -> str:
    """Return what the user has given to this process for a key of engine=openai."""
    value = getattr(engine, _name(key)) or os.environ.get(VARIABLES[key])
    if not value:
        raise UserError(f"engine=openai needs {key} (or {VARIABLES[key]}), which is stored nowhere")
    return str(value)


def check_server_given(config: Config) -> None:
    """Check that an engine=openai knows its server, before anything is written."""
    if isinstance(config.engine, OpenAiConfig):
        for key in (URL, ADAPTER_DIR):
            of_server(config.engine, key)


def reward_of(config: Config) -> Any:
    """Return `objective.reward`; where it is null, the one in the environment; None without any."""
    if not hasattr(config.objective, "reward"):
        return None
    return config.objective.reward if config.objective.reward is not None else os.environ.get(REWARD_VARIABLE) or None


def for_workers(own: OwnCode) -> AbstractContextManager[None]:
    """Give what the user has given to the jobs of a sweep inside the block, in this process and those that it starts.

    They start in a working directory that `sweep.json` names: PYTHONSAFEPATH keeps modules there from being imported.
    """
    return environment({"PYTHONSAFEPATH": "1"} | {KEYS[key]: value for key, value in own.items()})


def _setting(text: str) -> tuple[str, str | None]:
    """Return the key of an override, without `++` and without a package, and its value without quotes."""
    key, _, value = text.lstrip("+~").partition("=")
    value = re.sub(r"""^(["'])(.*)\1$""", r"\2", value.strip())
    return key.partition("@")[0].strip(), None if value == "null" else value


def _absolute(key: str, value: str) -> str:
    """Return a path, or a function's file, as an absolute path: jobs may run in another working directory."""
    if key == URL:
        return value
    if key != REWARD:
        return str(Path(value).expanduser().absolute())
    shuffled = SHUFFLED if value.startswith(SHUFFLED) else ""
    place, _, function = value.removeprefix(SHUFFLED).rpartition(":")
    return f"{shuffled}{Path(place).expanduser().absolute()}:{function}" if place.endswith(".py") else value


def _with(config: Config, key: str, value: Any) -> Config:
    part: Any = getattr(config, _group(key))
    return config.replace(**{_group(key): part.replace(**{_name(key): value})})


def _group(key: str) -> str:
    return key.partition(".")[0]


def _name(key: str) -> str:
    return key.partition(".")[2]
