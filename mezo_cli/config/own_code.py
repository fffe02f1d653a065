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

_OVERRIDE = re.compile(r"(?:\+\+)?(engine\.python|objective\.reward)\s*=(.*)", re.DOTALL)
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


@dataclasses.dataclass(frozen=True)
class OwnCode:
    """What the user has given to this process; None: nothing.

    Attributes:
        python: `engine.python`, an absolute path.
        reward: `objective.reward`, if it names a function; a file's path is absolute. From Python also a callable.
    """

    python: str | None = None
    reward: Any = None

    @property
    def overrides(self) -> list[str]:
        """The overrides that give it."""
        pairs = {PYTHON: self.python, REWARD: self.reward}
        return [f"{key}={value}" for key, value in pairs.items() if value is not None]


def split_own_code(overrides: Sequence[str]) -> tuple[list[str], OwnCode]:
    """Return the overrides without `engine.python=PATH` and without a function as `objective.reward`, and these two.

    The last value of a key counts. A reward that is a name or a mixture of names stays among the overrides.

    Raises:
        UserError: for several values, and for a value that refers to other settings, which may be a file's.
    """
    own, rest = OwnCode(), []
    for text in overrides:
        match = _OVERRIDE.fullmatch(text)
        value = _unquoted(match[2]) if match else ""
        is_python = match is not None and match[1] == PYTHON
        if not is_python and not names_code(value):
            rest.append(text)
            own = own if match is None else dataclasses.replace(own, reward=None)
            continue
        if not value or "," in value or "${" in value:
            what, variable = ("path", VARIABLE) if is_python else ("function", REWARD_VARIABLE)
            raise UserError(f"'{text}': expected one {what}, without a comma or ${{...}}; or give it as {variable}")
        if is_python:
            path = None if value == "null" else str(Path(value).expanduser().absolute())
            own = dataclasses.replace(own, python=path)
        else:
            own = dataclasses.replace(own, reward=_absolute(value))
    return rest, own


def with_own_code(config: Config, own: OwnCode) -> Config:
    """Return the config with what the user has given.

    Raises:
        SettingError: when the config has no engine, or its objective no reward.
    """
    changed = config
    if own.python is not None:
        if not isinstance(config.engine, VllmConfig):
            why = f"engine={config.engine.name} does not read it, only engine=vllm"
            raise SettingError(PYTHON, f"{PYTHON}={own.python}: {why}")
        changed = dataclasses.replace(changed, engine=dataclasses.replace(config.engine, python=own.python))
    if own.reward is not None:
        if not hasattr(config.objective, "reward"):
            why = f"objective={config.objective.name} does not read it, only objective=generate"
            raise SettingError(REWARD, f"{REWARD}={own.reward}: {why}")
        objective: Any = config.objective
        changed = dataclasses.replace(changed, objective=dataclasses.replace(objective, reward=own.reward))
    if changed is not config:
        check_rules(changed)
    return changed


def has_own_python(config: Config) -> bool:
    """Return whether the engine of a run is started by a program that the user has given to this process."""
    return isinstance(config.engine, VllmConfig) and bool(config.engine.python or os.environ.get(VARIABLE))


def has_own_reward(config: Config) -> bool:
    """Return whether the reward of a run is a function that the user has given to this process."""
    reward = reward_of(config)
    return callable(reward) or names_code(reward)


def reward_of(config: Config) -> Any:
    """Return `objective.reward`; where it is null, the one in the environment; None without any."""
    if not hasattr(config.objective, "reward"):
        return None
    return config.objective.reward if config.objective.reward is not None else os.environ.get(REWARD_VARIABLE) or None


def names_code(reward: Any) -> bool:
    """Return whether a reward is `FILE.py:function` or `package.module:function`, with `shuffled:` before it or not."""
    return isinstance(reward, str) and ":" in reward.removeprefix(SHUFFLED) and not reward.startswith("{")


@contextlib.contextmanager
def for_workers(own: OwnCode) -> Iterator[None]:
    """Give what the user has given to the jobs of a sweep inside the block.

    They get it in this process and in those that it starts.

    They start in a working directory that `sweep.json` names: PYTHONSAFEPATH keeps modules there from being imported.
    """
    variables = {"PYTHONSAFEPATH": "1"} | ({} if own.python is None else {VARIABLE: own.python})
    variables |= {} if own.reward is None else {REWARD_VARIABLE: own.reward}
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
        key, _, value = name.partition("=")
        if key.strip() == REWARD and names_code(_unquoted(value)):
            raise UserError(f"{source}: '{text}': {REWARD_FROM_USER}; take it out of the file, and give it again")
        if name.startswith(("hydra/", "hydra.launcher", "hydra.sweeper")) and not _HARMLESS.fullmatch(text):
            raise UserError(
                f"{source}: '{text}' may run a program, and is not taken from a file: give the launcher with its "
                f"settings again, mezo resume {source.parent} hydra/launcher=... hydra.launcher.KEY=..."
            )


def _unquoted(value: str) -> str:
    return re.sub(r"""^(["'])(.*)\1$""", r"\2", value.strip())


def _absolute(reward: str) -> str:
    """Return `FILE.py:function` with an absolute path, so that it holds in any working directory; else the same."""
    name = reward.removeprefix(SHUFFLED)
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        return reward
    return f"{SHUFFLED if name != reward else ''}{Path(place).expanduser().absolute()}:{function}"
