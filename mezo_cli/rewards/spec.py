"""What `objective.reward` says: built-in rewards with weights and settings, or one function of the user's own."""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezo_cli.config.base import SHUFFLED, Number, SettingError, Settings, own_function, show
from mezo_cli.config.explain import validate
from mezo_cli.config.registry import REWARDS
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import REWARD, reward_of

NO_REWARD = (
    "no reward is given: add objective.reward=NAME, or a function of your own by objective.reward=FILE.py:function or "
    "MEZO_REWARD (a run does not store it)"
)
FORMS = "a name, {NAME: WEIGHT}, shuffled:NAME, FILE.py:function or package.module:function"


@dataclass(frozen=True)
class Part:
    """One reward."""

    name: str  # as the user gave it
    target: str | Callable[..., Any]  # `FILE.py:function` or `package.module:attribute`, for the worker; or a callable
    weight: float = 1.0  # in the sum of a mixture
    settings: Mapping[str, Any] | None = None  # what makes an instance of its class; None: it is a function


@dataclass(frozen=True)
class RewardSpec:
    """A reward that can be opened (`scoring.Reward`)."""

    parts: tuple[Part, ...]  # the rewards that are summed; a function of the user's own is the only one
    shuffled: bool = False  # each completion is scored against another row of its batch, the null control
    sha256: str | None = None  # of the file of a function of the user's own; None for names and callables

    @property
    def in_process(self) -> bool:
        """Whether it is a callable, which runs in this process and without a timeout."""
        return callable(self.parts[0].target)

    def describe(self) -> str:
        """Return it as one text: `countdown + 0.1 format`."""
        weights = ["" if part.weight == 1 else f"{part.weight:g} " for part in self.parts]
        text = " + ".join(f"{weight}{part.name}" for weight, part in zip(weights, self.parts, strict=True))
        return f"{SHUFFLED}{text}" if self.shuffled else text

    def record(self) -> dict[str, Any]:
        """Return what `run.json` keeps of it."""
        return {"name": self.describe(), "sha256": self.sha256, "in_process": self.in_process}


class _Weight(Settings):
    weight: Number = 1.0


def reward_spec(config: Config) -> RewardSpec | None:
    """Return the reward of a run; None if it has none."""
    reward = reward_of(config)
    return None if reward is None else parse_reward(reward)


def parse_reward(setting: Any) -> RewardSpec:
    """Return the reward that a value of `objective.reward` stands for.

    It is a text (`FORMS`), name -> weight or {weight: ..., settings}, or a callable `function(completions, rows)`.
    """
    if callable(setting):
        name = f"{getattr(setting, '__module__', '')}.{getattr(setting, '__qualname__', type(setting).__name__)}"
        return RewardSpec((Part(name, setting),))
    if isinstance(setting, Mapping) and setting:
        parts = tuple(_registered(str(name), value) for name, value in setting.items())
        if all(part.weight == 0 for part in parts):
            raise SettingError(REWARD, f"{REWARD}={show(setting)}: all weights are 0")
        return RewardSpec(parts)
    if not isinstance(setting, str) or not setting:
        raise SettingError(REWARD, f"{REWARD}={show(setting)}: expected {FORMS}")
    name = setting.removeprefix(SHUFFLED)
    part, sha256 = (_registered(name, 1), None) if own_function(setting) is None else _own_code(name)
    return RewardSpec((part,), name != setting, sha256)


def describe_change(config: Config, info: Mapping[str, Any]) -> str:
    """Return how the code of a run's reward differs from that which run.json says it was trained on; "" if not."""
    spec, recorded = reward_spec(config), info.get("reward")  # nothing is recorded before the first step
    if spec is None or recorded is None or spec.sha256 == recorded["sha256"]:
        return ""
    was, now = (value[:12] if value else "none" for value in (recorded["sha256"], spec.sha256))
    return f"{REWARD}={spec.describe()}: its code is not what the run was trained on (sha256 {was}, now {now})"


def _registered(name: str, value: Any) -> Part:
    if ":" in name:
        why = "weights are for built-in names and plug-ins; a function stands by itself and returns its parts as a dict"
        raise SettingError(REWARD, f"{REWARD}={{{name}: ...}}: {why}")
    target = REWARDS.load(name)
    parent = f"{REWARD}.{name}."
    settings, made = dict(value) if isinstance(value, Mapping) else {"weight": value}, None
    if isinstance(target, type) and issubclass(target, Settings):
        made = validate(target, {key: settings.pop(key) for key in [*settings] if key != "weight"}, parent).model_dump()
    return Part(name, REWARDS.targets[name], validate(_Weight, settings, parent).weight, made)


def _own_code(name: str) -> tuple[Part, str]:
    place, _, function = name.rpartition(":")
    is_file = place.endswith(".py")
    if not function.isidentifier() or not (is_file or re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", place)):
        raise SettingError(REWARD, f"{REWARD}={name}: expected {FORMS}")
    file = Path(place).expanduser().absolute() if is_file else module_file(place)
    if file is None:
        raise SettingError(REWARD, f"{REWARD}={name}: mezo's environment has no module '{place}' with a file")
    try:
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise SettingError(REWARD, f"{REWARD}={name}: {file}: {error.strerror}") from error
    return Part(name, f"{file}:{function}" if is_file else name), sha256


def module_file(name: str) -> Path | None:
    """Return the file of a module without importing it or its package; None if there is none."""
    path, spec, full = None, None, ""
    for part in name.split("."):
        full = f"{full}.{part}" if full else part
        spec = next(filter(None, (finder.find_spec(full, path) for finder in sys.meta_path)), None)
        path = spec.submodule_search_locations or [] if spec else []
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None
