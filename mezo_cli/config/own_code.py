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
from mezo_cli.config.schema import Config, OpenAiConfig, SettingError, VllmConfig
from mezo_cli.errors import UserError

PYTHON = "engine.python"
VARIABLE = "MEZO_ENGINE_PYTHON"  # what engine.python=PATH says, for this process and those that it starts
URL, ADAPTER_DIR = "engine.url", "engine.adapter_dir"
VARIABLES = {PYTHON: VARIABLE, URL: "MEZO_ENGINE_URL", ADAPTER_DIR: "MEZO_ENGINE_ADAPTER_DIR"}
NOT_STORED = f"which is not stored: give it again, {PYTHON}=PATH or {VARIABLE}"

REWARD = "objective.reward"
REWARD_VARIABLE = "MEZO_REWARD"  # what objective.reward=FILE.py:function says, as VARIABLE
REWARD_FROM_USER = f"it names a function, which only the command line, the Python API or {REWARD_VARIABLE} can give"
REWARD_NOT_STORED = f"which is not stored: give it again, {REWARD}=FILE.py:function or {REWARD_VARIABLE}"
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


@dataclasses.dataclass(frozen=True)
class OwnCode:
    """What the user has given to this process; None: nothing.

    Attributes:
        python: `engine.python`, an absolute path.
        url, adapter_dir: `engine.url` and `engine.adapter_dir`, an absolute path.
        reward: `objective.reward`, if it names a function; a file's path is absolute. From Python also a callable.
    """

    python: str | None = None
    reward: Any = None
    url: str | None = None
    adapter_dir: str | None = None

    @property
    def pairs(self) -> dict[str, Any]:
        """What is given, by key."""
        values = {key: getattr(self, field_of(key)) for key in (*VARIABLES, REWARD)}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def overrides(self) -> list[str]:
        """The overrides that give it."""
        return [f"{key}={value}" for key, value in self.pairs.items()]


def split_own_code(overrides: Sequence[str]) -> tuple[list[str], OwnCode]:
    """Return the overrides without what only the user can give, and this: `engine.python`, a reward's function, ...

    The last value of a key counts. A reward that is a name or a mixture of names stays among the overrides.

    Raises:
        UserError: for several values, and for a value that refers to other settings, which may be a file's.
    """
    own, rest = OwnCode(), []
    for text in overrides:
        match = _OVERRIDE.fullmatch(text)
        value = _unquoted(match[2]) if match else ""
        key = match[1] if match else ""
        if key not in VARIABLES and not names_code(value):
            rest.append(text)
            own = own if match is None else dataclasses.replace(own, reward=None)
            continue
        if not value or "," in value or "${" in value:
            what, variable = ("value", VARIABLES[key]) if key in VARIABLES else ("function", REWARD_VARIABLE)
            raise UserError(f"'{text}': expected one {what}, without a comma or ${{...}}; or give it as {variable}")
        if key in VARIABLES:
            text = value if key == URL else str(Path(value).expanduser().absolute())
            own = dataclasses.replace(own, **{field_of(key): None if value == "null" else text})
        else:
            own = dataclasses.replace(own, reward=_absolute(value))
    return rest, own


def with_own_code(config: Config, own: OwnCode) -> Config:
    """Return the config with what the user has given.

    Raises:
        SettingError: when the config has no engine, or its objective no reward.
    """
    changed = config
    for key, value in own.pairs.items():
        if key == REWARD:
            continue
        if not hasattr(config.engine, field_of(key)):
            reader = "vllm" if key == PYTHON else "openai"
            why = f"engine={config.engine.name} does not read it, only engine={reader}"
            raise SettingError(key, f"{key}={value}: {why}")
        engine: Any = changed.engine
        changed = dataclasses.replace(changed, engine=dataclasses.replace(engine, **{field_of(key): value}))
    if own.reward is not None:
        if not hasattr(config.objective, "reward"):
            why = f"objective={config.objective.name} does not read it, only objective=generate"
            raise SettingError(REWARD, f"{REWARD}={own.reward}: {why}")
        objective: Any = config.objective
        changed = dataclasses.replace(changed, objective=dataclasses.replace(objective, reward=own.reward))
    if changed is not config:
        check_rules(changed)
    return changed


def field_of(key: str) -> str:
    """Return the name of a key in its group: `python` of `engine.python`."""
    return key.rpartition(".")[2]


def from_user(key: str) -> str:
    """Return why a file cannot give a key of `VARIABLES`."""
    what = "names a program" if key == PYTHON else "says where your weights and prompts go"
    return f"it {what}, which only the command line, the Python API or {VARIABLES[key]} can give"


def has_own_python(config: Config) -> bool:
    """Return whether the engine of a run is started by a program that the user has given to this process."""
    return isinstance(config.engine, VllmConfig) and bool(config.engine.python or os.environ.get(VARIABLE))


def of_server(engine: OpenAiConfig, key: str) -> str:
    """Return what the user has given to this process for a key of engine=openai.

    Raises:
        UserError: when it is missing.
    """
    value = getattr(engine, field_of(key)) or os.environ.get(VARIABLES[key])
    if not value:
        raise UserError(f"engine=openai needs {key} (or {VARIABLES[key]}), which is stored nowhere")
    return str(value)


def check_server_given(config: Config) -> None:
    """Check that an engine=openai knows its server, before anything is written.

    Raises:
        UserError: with the first key that is missing.
    """
    if isinstance(config.engine, OpenAiConfig):
        for key in (URL, ADAPTER_DIR):
            of_server(config.engine, key)


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
    names = {**VARIABLES, REWARD: REWARD_VARIABLE}
    variables = {"PYTHONSAFEPATH": "1"} | {names[key]: value for key, value in own.pairs.items()}
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
        of_engine = next((key for key in VARIABLES if name.startswith(key)), None)
        if of_engine is not None:
            raise UserError(f"{source}: '{text}': {from_user(of_engine)}; take it out of the file, and give it again")
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
