"""What runs a program comes from the user alone: the command line, the Python API or the environment, never a file.

`engine.python` names a program, and `objective.reward` may name a function. Both are taken out of the overrides before
anything is composed, so that one among the composed settings is a file's, which is refused. They are stored nowhere:
whoever continues a run gives them again.
"""

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mezo_cli.config.rules import check_rules
from mezo_cli.config.schema import Config, OpenAiConfig, SettingError, VllmConfig
from mezo_cli.errors import UserError
from mezo_cli.system import environment

PYTHON = "engine.python"
VARIABLE = "MEZO_ENGINE_PYTHON"  # what engine.python=PATH says, for this process and those that it starts
URL, ADAPTER_DIR = "engine.url", "engine.adapter_dir"
VARIABLES = {PYTHON: VARIABLE, URL: "MEZO_ENGINE_URL", ADAPTER_DIR: "MEZO_ENGINE_ADAPTER_DIR"}

REWARD = "objective.reward"
REWARD_VARIABLE = "MEZO_REWARD"  # what objective.reward=FILE.py:function says, as VARIABLE
_NAMES = {**VARIABLES, REWARD: REWARD_VARIABLE}
FIELDS = {PYTHON: "own_engine_python", REWARD: "own_reward"}  # of run.json and sweep.json: whether it was given
SHUFFLED = "shuffled:"  # before the name of a reward: the null control

_OVERRIDE = re.compile(r"(?:\+\+)?(engine\.(?:python|url|adapter_dir)|objective\.reward)\s*=(.*)", re.DOTALL)
# What a stored sweep may say of its launcher and sweeper: any number, and the words of settings that name no program,
# no module and no file. A word has no space, no line break and no slash: some go into a batch script.
_WORDS = (
    "backend|prefer|require|pre_dispatch|batch_size|max_nbytes|mmap_mode|name|partition|qos|account|constraint|exclude|"
    "gres|mem_per_gpu|mem_per_cpu|direction|study_name"
)
_HARMLESS = re.compile(
    r"\+{0,2}(hydra/(launcher|sweeper)=\w+"
    r"|hydra\.(launcher|sweeper)\.[\w.]+=([-+]?[\d.]+(e[-+]?\d+)?|true|false|null)"
    rf"|hydra\.(launcher|sweeper)\.({_WORDS})=[\w.:*+-]+)",
    re.ASCII | re.IGNORECASE,
)


# What the user has given to this process, by key: `engine.python` and `engine.adapter_dir`, absolute paths;
# `engine.url`; `objective.reward`, if it names a function, of an absolute path, or from Python is a callable.
OwnCode = dict[str, Any]


def split_own_code(overrides: Sequence[str]) -> tuple[list[str], OwnCode]:
    """Return the overrides without what only the user can give, and this: `engine.python`, a reward's function, ...

    The last value of a key counts. A reward that is a name or a mixture of names stays among the overrides.
    """
    own, rest = OwnCode(), []
    for text in overrides:
        match = _OVERRIDE.fullmatch(text)
        key, value = (match[1], _unquoted(match[2])) if match else ("", "")
        own.pop(key, None)
        if key not in VARIABLES and not names_code(value):
            rest.append(text)
            continue
        if not value or "," in value or "${" in value:
            what = "function" if key == REWARD else "value"
            raise UserError(f"'{text}': expected one {what}, without a comma or ${{...}}; or give it as {_NAMES[key]}")
        if key == REWARD:
            name = value.removeprefix(SHUFFLED)
            place, _, function = name.rpartition(":")
            is_file, shuffled = place.endswith(".py"), SHUFFLED if name != value else ""
            own[key] = f"{shuffled}{Path(place).expanduser().absolute()}:{function}" if is_file else value
        elif value != "null":
            own[key] = value if key == URL else str(Path(value).expanduser().absolute())
    return rest, own


def with_own_code(config: Config, own: OwnCode) -> Config:
    """Return the config with what the user has given."""
    for key, value in own.items():
        group, _, name = key.rpartition(".")
        part: Any = getattr(config, group)
        if not hasattr(part, name):
            readers = {PYTHON: "vllm", REWARD: "generate"}
            why = f"{group}={part.name} does not read it, only {group}={readers.get(key, 'openai')}"
            raise SettingError(key, f"{key}={value}: {why}")
        config = dataclasses.replace(config, **{group: dataclasses.replace(part, **{name: value})})
    if own:
        check_rules(config)
    return config


def why_not_from_file(key: str, value: Any) -> str:
    """Return why a file cannot give this value of a key, which only the user can; "" for all other values."""
    if key not in _NAMES or value is None or (key == REWARD and not names_code(value)):
        return ""
    what = {PYTHON: "names a program", REWARD: "names a function"}.get(key, "says where your weights and prompts go")
    return f"it {what}, which only the command line, the Python API or {_NAMES[key]} can give"


def without_own_code(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested values of a config without what a file cannot give."""
    kept = dict(plain)
    for group, name in (key.split(".") for key in _NAMES):
        part = kept.get(group)
        if isinstance(part, Mapping) and why_not_from_file(f"{group}.{name}", part.get(name)):
            kept[group] = {**part, name: None}
    return kept


def check_not_from_file(config: Config) -> None:
    """Check a config that is composed without what the user has given (`split_own_code`): what is there is a file's."""
    for group, name in (key.split(".") for key in _NAMES):
        key, value = f"{group}.{name}", getattr(getattr(config, group), name, None)
        if why := why_not_from_file(key, value):
            raise SettingError(key, f"{key}={value}, set by a config file: {why}")


def own_code_used(config: Config) -> dict[str, bool]:
    """Return which of `FIELDS` hold of a run: it uses a program or a function that this process was given."""
    engine, reward = config.engine, reward_of(config)
    own_python = isinstance(engine, VllmConfig) and bool(engine.python or os.environ.get(VARIABLE))
    used = {FIELDS[PYTHON]: own_python, FIELDS[REWARD]: callable(reward) or names_code(reward)}
    return {name: True for name, is_used in used.items() if is_used}


def check_given_again(what: str, before: Mapping[str, Any], used: Collection[str]) -> None:
    """Check that what a run or sweep used of the user's own code is given again: of `FIELDS`, `used` holds now."""
    shown = {PYTHON: ("an", "PATH"), REWARD: ("a function as", "FILE.py:function")}
    for key, (article, value) in shown.items():
        if before.get(FIELDS[key]) and FIELDS[key] not in used and not os.environ.get(_NAMES[key]):
            why = f"which is not stored: give it again, {key}={value} or {_NAMES[key]}"
            raise UserError(f"{what} with {article} {key}, {why}")


def of_server(engine: OpenAiConfig, key: str) -> str:
    """Return what the user has given to this process for a key of engine=openai."""
    value = getattr(engine, key.partition(".")[2]) or os.environ.get(VARIABLES[key])
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


def names_code(reward: Any) -> bool:
    """Return whether a reward is `FILE.py:function` or `package.module:function`, with `shuffled:` before it or not."""
    return isinstance(reward, str) and ":" in reward.removeprefix(SHUFFLED) and not reward.startswith("{")


def for_workers(own: OwnCode) -> AbstractContextManager[None]:
    """Give what the user has given to the jobs of a sweep inside the block, in this process and those that it starts.

    They start in a working directory that `sweep.json` names: PYTHONSAFEPATH keeps modules there from being imported.
    """
    return environment({"PYTHONSAFEPATH": "1"} | {_NAMES[key]: value for key, value in own.items()})


def check_stored(overrides: Iterable[str], source: Path) -> None:
    """Check overrides that a file has kept, a sweep's record: none of them may run code."""
    for text in overrides:
        name = text.lstrip("+~")
        key = next((own for own in _NAMES if name.startswith(own)), "")
        if why := why_not_from_file(key, _unquoted(name.partition("=")[2])):
            raise UserError(f"{source}: '{text}': {why}; take it out of the file, and give it again")
        if name.startswith(("hydra/", "hydra.launcher", "hydra.sweeper")) and not _HARMLESS.fullmatch(text):
            raise UserError(
                f"{source}: '{text}' may run a program, and is not taken from a file: give the launcher with its "
                f"settings again, mezo resume {source.parent} hydra/launcher=... hydra.launcher.KEY=..."
            )


def _unquoted(value: str) -> str:
    return re.sub(r"""^(["'])(.*)\1$""", r"\2", value.strip())
