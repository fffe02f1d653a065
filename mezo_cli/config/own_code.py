"""What runs a program of the user's own, or says where weights and prompts go: it is stored nowhere.

`engine.python` names a program, `objective.reward` may name a function, `engine.url` and `engine.adapter_dir` say where
weights and prompts go. They come from the user: the command line, the Python API, the environment or a `--config-dir`.
A run, a sweep and an export are data and may be somebody else's: whoever goes on with one gives them again.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mezo_cli.config.base import SettingError
from mezo_cli.config.schema import Config, OpenAiConfig, VllmConfig
from mezo_cli.config.validation import check_rules
from mezo_cli.errors import UserError
from mezo_cli.process.environment import environment

REWARD, PYTHON, URL, ADAPTER_DIR = "objective.reward", "engine.python", "engine.url", "engine.adapter_dir"
KEYS = {  # and the variables that say what KEY=VALUE does, for this process and those that it starts
    PYTHON: "MEZO_ENGINE_PYTHON",
    URL: "MEZO_ENGINE_URL",
    ADAPTER_DIR: "MEZO_ENGINE_ADAPTER_DIR",
    REWARD: "MEZO_REWARD",
}
USED = "own_reward"  # of run.json: whether the run's process was given a function
SHUFFLED = "shuffled:"  # before the name of a reward: the null control

# What the user has given to this process, by key: `engine.python` and `engine.adapter_dir`, absolute paths;
# `engine.url`; `objective.reward`, if it names a function, of an absolute path, or from Python is a callable.
OwnCode = dict[str, Any]


def is_own(key: str, value: Any) -> bool:
    """Return whether a value of a key is the user's own code or address, which no run, sweep or export stores."""
    if key == REWARD and isinstance(value, str):  # FILE.py:function or package.module:function
        return ":" in value.removeprefix(SHUFFLED) and not value.lstrip().startswith("{")
    return callable(value) if key == REWARD else key in KEYS and value is not None


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
            how = "take it out, and give it on the command line"
            raise UserError(f"{source}: '{text}' is not taken from a file: {how}")


def own_of(config: Config) -> OwnCode:
    """Return what in a config is the user's own."""
    groups: Any = {"objective": config.objective, "engine": config.engine}
    values = {key: getattr(groups[key.split(".")[0]], key.split(".")[1], None) for key in KEYS}
    return {key: value for key, value in values.items() if is_own(key, value)}


def with_own_code(config: Config, own: OwnCode) -> Config:
    """Return the config of a run, which is stored without it, with what the user has given again; paths absolute."""
    for key, value in own.items():
        group, name = key.split(".")
        part: Any = getattr(config, group)
        if not hasattr(part, name):
            reader = {PYTHON: "vllm", REWARD: "generate"}.get(key, "openai")
            raise SettingError(key, f"{key}={value}: {group}={part.name} does not read it, only {group}={reader}")
        config = config.replace(**{group: part.replace(**{name: _absolute(key, value)})})
    if own:
        check_rules(config)
    return config


def without_own_code(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested values of a config without what is not stored."""
    kept = dict(plain)
    for key in KEYS:
        group, name = key.split(".")
        part = kept.get(group)
        if isinstance(part, Mapping) and is_own(key, part.get(name)):
            kept[group] = {**part, name: None}
    return kept


def own_code_used(config: Config) -> dict[str, bool]:
    """Return what run.json says of a run that uses a function that this process was given."""
    return {USED: True} if is_own(REWARD, reward_of(config)) else {}


def check_given_again(what: str, info: Mapping[str, Any], config: Config) -> None:
    """Check that the function that a run was trained with, by its run.json, is given again."""
    if info.get(USED) and not own_code_used(config):
        why = f"which is not stored: give it again, {REWARD}=FILE.py:function or {KEYS[REWARD]}"
        raise UserError(f"{what} with a function as {REWARD}, {why}")


def of_server(engine: OpenAiConfig | VllmConfig, key: str) -> str:
    """Return what the user has given to this process for a key of an engine."""
    value = getattr(engine, key.split(".")[1]) or os.environ.get(KEYS[key])
    if not value:
        raise UserError(f"engine={engine.name} needs {key} (or {KEYS[key]}), which is stored nowhere")
    return str(value)


def check_server_given(config: Config) -> None:
    """Check that an engine knows its server or its program, before anything is written."""
    if isinstance(config.engine, VllmConfig):
        of_server(config.engine, PYTHON)
    if isinstance(config.engine, OpenAiConfig):
        for key in (URL, ADAPTER_DIR):
            of_server(config.engine, key)


def reward_of(config: Config) -> Any:
    """Return `objective.reward`; where it is null, the one in the environment; None without any."""
    if not hasattr(config.objective, "reward"):
        return None
    return config.objective.reward if config.objective.reward is not None else os.environ.get(KEYS[REWARD]) or None


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


def _absolute(key: str, value: Any) -> Any:
    """Return a path, or a function's file, as an absolute path: jobs may run in another working directory."""
    if key == URL or (key == REWARD and not isinstance(value, str)):
        return value
    if key != REWARD:
        return str(Path(value).expanduser().absolute())
    shuffled = SHUFFLED if value.startswith(SHUFFLED) else ""
    place, _, function = value.removeprefix(SHUFFLED).rpartition(":")
    return f"{shuffled}{Path(place).expanduser().absolute()}:{function}" if place.endswith(".py") else value
