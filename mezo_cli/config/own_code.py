"""What runs a program comes from the user alone: the command line, the Python API or the environment, never a file.

`engine.python` names a program, and `objective.reward` may name a function. Both are taken out of the overrides before
anything is composed, so that one among the composed settings is a file's, which is refused. They are stored nowhere:
whoever continues a run gives them again.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.rules import check_rules
from mezo_cli.config.schema import Config, SettingError, VllmConfig
from mezo_cli.errors import UserError

PYTHON = "engine.python"
VARIABLE = "MEZO_ENGINE_PYTHON"  # what engine.python=PATH says, for this process and those that it starts
FROM_USER = f"it names a program, which only the command line, the Python API or {VARIABLE} can give"
NOT_STORED = f"which is not stored: give it again, {PYTHON}=PATH or {VARIABLE}"

REWARD = "objective.reward"
REWARD_VARIABLE = "MEZO_REWARD"  # what objective.reward=FILE.py:function says, as VARIABLE
REWARD_FROM_USER = f"it names a function, which only the command line, the Python API or {REWARD_VARIABLE} can give"
REWARD_NOT_STORED = f"which is not stored: give it again, {REWARD}=FILE.py:function or {REWARD_VARIABLE}"
SHUFFLED = "shuffled:"  # before the name of a reward: the null control

_PYTHON = re.compile(r"(?:\+\+)?engine\.python\s*=(.*)", re.DOTALL)
_REWARD = re.compile(r"\+{0,2}objective\.reward\s*=\s*([^\s{].*)", re.DOTALL)
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


def split_python(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the overrides without `engine.python=PATH`, and the absolute path; None if it is not given, or is null.

    Raises:
        UserError: for several values, and for a value that refers to other settings, which may be a file's.
    """
    python, rest = None, []
    for text in overrides:
        match = _PYTHON.fullmatch(text)
        if match is None:
            rest.append(text)
            continue
        value = _unquoted(match[1])
        if not value or "," in value or "${" in value:
            raise UserError(f"'{text}': expected one path, without a comma or ${{...}}; or give it as {VARIABLE}")
        python = None if value == "null" else str(Path(value).expanduser().absolute())
    return rest, python


def names_code(reward: Any) -> bool:
    """Return whether a reward is `FILE.py:function` or `package.module:function`, with `shuffled:` before it or not."""
    return isinstance(reward, str) and ":" in reward.removeprefix(SHUFFLED)


def split_reward(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the overrides without an `objective.reward` that names a function, and its value with an absolute path.

    A built-in name or a mixture of them stays among the overrides.

    Raises:
        UserError: for several values, and for a value that refers to other settings, which may be a file's.
    """
    reward, rest = None, []
    for text in overrides:
        match = _REWARD.fullmatch(text)
        value = _unquoted(match[1]) if match else None
        if match:
            reward = None  # the last one wins
        if value is None or not names_code(value):
            rest.append(text)
            continue
        if "," in value or "${" in value:
            raise UserError(f"'{text}': expected one function, without a comma or ${{...}}; or give {REWARD_VARIABLE}")
        reward = absolute_reward(value)
    return rest, reward


def absolute_reward(reward: str) -> str:
    """Return `FILE.py:function` with an absolute path, so that it holds in any working directory; else the same."""
    name = reward.removeprefix(SHUFFLED)
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        return reward
    return f"{SHUFFLED if name != reward else ''}{Path(place).expanduser().absolute()}:{function}"


def reward_of(config: Config) -> Any:
    """Return `objective.reward`; where it is null, the reward in the environment; None without any."""
    reward = getattr(config.objective, "reward", None)
    return (os.environ.get(REWARD_VARIABLE) or None) if reward is None else reward


def with_reward(config: Config, reward: str | None) -> Config:
    """Return the config with the function that the user has given as `objective.reward`.

    Raises:
        SettingError: when the objective has no reward.
    """
    if reward is None:
        return config
    if not hasattr(config.objective, "reward"):
        why = f"objective={config.objective.name} does not read it, only objective=generate"
        raise SettingError(REWARD, f"{REWARD}={reward}: {why}")
    changed = dataclasses.replace(config, objective=dataclasses.replace(config.objective, reward=reward))  # type: ignore[call-arg]
    check_rules(changed)
    return changed


def with_python(config: Config, python: str | None) -> Config:
    """Return the config with the `engine.python` that the user has given.

    Raises:
        SettingError: when the config has no engine.
    """
    if python is None:
        return config
    if not isinstance(config.engine, VllmConfig):
        raise SettingError(PYTHON, f"{PYTHON}={python}: engine={config.engine.name} does not read it, only engine=vllm")
    changed = dataclasses.replace(config, engine=dataclasses.replace(config.engine, python=python))
    check_rules(changed)
    return changed


def has_own_python(config: Config) -> bool:
    """Return whether the engine of a run is started by a program that the user has given to this process."""
    return isinstance(config.engine, VllmConfig) and bool(config.engine.python or os.environ.get(VARIABLE))


@contextlib.contextmanager
def for_workers(python: str | None, reward: str | None = None) -> Iterator[None]:
    """Give `engine.python` and the function of `objective.reward` to the jobs of a sweep inside the block.

    They get it in this process and in those that it starts.

    They start in a working directory that `sweep.json` names: PYTHONSAFEPATH keeps modules there from being imported.
    """
    variables = {"PYTHONSAFEPATH": "1"} | ({} if python is None else {VARIABLE: python})
    variables |= {} if reward is None else {REWARD_VARIABLE: reward}
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def check_stored(overrides: Iterable[str], source: Path) -> None:
    """Check overrides that a file has kept, a sweep's record: none of them may run code.

    Raises:
        UserError: for `engine.python`, for a function as `objective.reward`, and for a setting of Hydra's launcher or
            sweeper that may name a program.
    """
    for text in overrides:
        name = text.lstrip("+~")
        if name.startswith(PYTHON):
            raise UserError(f"{source}: '{text}': {FROM_USER}; take it out of the file, and give it again")
        match = _REWARD.fullmatch(text)
        if match and names_code(_unquoted(match[1])):
            raise UserError(f"{source}: '{text}': {REWARD_FROM_USER}; take it out of the file, and give it again")
        if name.startswith(("hydra/", "hydra.launcher", "hydra.sweeper")) and not _HARMLESS.fullmatch(text):
            raise UserError(
                f"{source}: '{text}' may run a program, and is not taken from a file: give the launcher with its "
                f"settings again, mezo resume {source.parent} hydra/launcher=... hydra.launcher.KEY=..."
            )


def _unquoted(value: str) -> str:
    return re.sub(r"""^(["'])(.*)\1$""", r"\2", value.strip())
