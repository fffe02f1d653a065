"""The settings of the built-in objectives, and what `objective.reward` says. Nothing here imports torch."""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from mezo_cli.config.base import (
    SHUFFLED,
    Conflicts,
    NotNegativeNumber,
    Number,
    Own,
    Positive,
    PositiveNumber,
    SettingError,
    Settings,
    own_function,
    show,
)
from mezo_cli.config.explain import validate
from mezo_cli.config.own_code import REWARD, reward_of
from mezo_cli.config.registry import REWARDS
from mezo_cli.config.schema import Config, ObjectiveConfig, TaskConfig
from mezo_cli.errors import did_you_mean, join


class MlmConfig(ObjectiveConfig):
    """Settings of objective mlm."""

    implementation: ClassVar[str] = "mezo_cli.objectives.encoders:Mlm"
    per_label: ClassVar[tuple[str, ...]] = ("task.label_words",)

    def conflicts(self, config: Config) -> Conflicts:
        """Reject a task without a template, too."""
        if config.task.template is None:
            yield "task.template", f"give task.template=...{config.task.offered}"
        yield from super().conflicts(config)


class ClsConfig(ObjectiveConfig):
    """Settings of objective cls."""

    implementation: ClassVar[str] = "mezo_cli.objectives.encoders:Cls"
    has_head: ClassVar[bool] = True


class LmConfig(ObjectiveConfig):
    """Settings of objective lm."""

    implementation: ClassVar[str] = "mezo_cli.objectives.decoder:Lm"
    per_label: ClassVar[tuple[str, ...]] = ("task.lm.label_words", "task.label_words")
    demonstrates: ClassVar[bool] = True


class ChoiceConfig(ObjectiveConfig):
    """Settings of objective choice."""

    implementation: ClassVar[str] = "mezo_cli.objectives.choice:Choice"
    per_label: ClassVar[tuple[str, ...]] = ("task.choice.candidates",)
    needs_labels: ClassVar[bool] = False
    demonstrates: ClassVar[bool] = True
    metric_names: ClassVar[list[str]] = ["accuracy"]

    loss: Literal["cross_entropy", "lm", "accuracy"] = Field(
        "cross_entropy",
        description="over a row's candidates; lm: of the right ones' tokens; accuracy: without a gradient",
    )
    normalize: Literal["mean", "sum"] = Field(
        "mean", description="the score of a candidate is the mean of its tokens' log-probabilities, or their sum"
    )

    def data_task(self, task: TaskConfig) -> TaskConfig:
        """Return the task with its labels, which number the candidates; without them where rows list candidates."""
        return task if task.choice.each is None else task.replace(labels=[])

    def conflicts(self, config: Config) -> Conflicts:
        """Reject a task without candidates, and labels that do not number them."""
        task, choice = config.task, config.task.choice
        if choice.prompt is None:
            why = f"task '{task.name}' has no prompt with candidates (objective={self.name})"
            yield "task.choice.prompt", f"{why}: set task.choice.prompt and .candidates{task.offered}"
        if (choice.each is None) != (choice.right is None):
            missing = "each" if choice.each is None else "right"
            yield f"task.choice.{missing}", "task.choice.each lists a row's texts, task.choice.right has the right one"
        count = len(choice.candidates)
        if choice.each is not None and count != 1:
            why = f"with task.choice.each it needs one template of {count}, with {{candidate}}"
            yield "task.choice.candidates", why
        if choice.each is None and (count < 2 or count != len(task.labels)):
            why = f"{count} for {len(task.labels)} labels ({join(task.labels)})"
            yield "task.choice.candidates", f"{why}; give one for each, in the same order, two or more"


class GenerateConfig(ObjectiveConfig):
    """Settings of objective generate."""

    implementation: ClassVar[str] = "mezo_cli.objectives.generation:Generation"
    needs_labels: ClassVar[bool] = False
    demonstrates: ClassVar[bool] = True
    differentiable_loss: ClassVar[str] = "lm"
    metric_names: ClassVar[list[str] | None] = None  # a reward names its parts when it is called

    loss: Literal["reward", "lm"] = Field(
        "reward", description="minus the mean reward of the completions, or the cross-entropy of the answers' tokens"
    )
    reward: Annotated[
        Any, AfterValidator(lambda value: own_function(value) or value), Own("MEZO_REWARD", own_function)
    ] = Field(None, description="a name, NAME: WEIGHT pairs, `shuffled:NAME`, or a function of one's own; null: none")
    reward_timeout: PositiveNumber = Field(10.0, le=1e6, description="seconds for the rewards of a batch")
    reward_errors: Literal["stop", "zero"] = Field(
        "stop", description="what a row does whose reward fails: it ends the run, or counts 0"
    )
    max_new_tokens: Positive = Field(50, description="the most tokens of a completion")
    temperature: NotNegativeNumber = Field(0.0, description="0: greedy, else drawn from softmax(logits / temperature)")
    samples: Positive = Field(1, description="completions per prompt and member")
    reduce: Literal["mean", "max"] = Field(
        "mean", description="a row's reward of those of its completions; max: pass@k"
    )
    eval_temperature: NotNegativeNumber = Field(0.0, description="the temperature of evaluations")
    eval_samples: Positive = Field(1, description="completions per prompt of evaluations")
    drift: bool | None = Field(
        None, description="each evaluation says how far the weights have moved; null: where a copy takes at most 1 GB"
    )

    @property
    def default_metric(self) -> str:
        """The reward, if there is one."""
        return "loss" if self.reward is None and self.loss == "lm" else "reward"

    def completion_tokens(self, config: Config) -> int:
        """Return `max_new_tokens` for a run with a reward or a metric of completions."""
        completes = self.loss == "reward" or reward_of(config) is not None or config.task.metric is not None
        return self.max_new_tokens if completes else 0

    def conflicts(self, config: Config) -> Conflicts:
        """Reject a task without the answers or the metric that are asked for, and drawing the same text twice."""
        yield from super().conflicts(config)
        task, reward = config.task, reward_of(config)
        if self.loss == "lm" and task.generate.answer is None:
            yield "objective.loss", f"task '{task.name}' has no task.generate.answer"
        if reward is not None:
            parse_reward(reward)
        if task.metric is not None and task.metric not in REWARDS.names:
            yield "task.metric", f"not one of {join(REWARDS.names)}{did_you_mean(task.metric, REWARDS.names)}"
        for of in ("", "eval_"):
            if getattr(self, f"{of}samples") > 1 and getattr(self, f"{of}temperature") == 0:
                yield f"objective.{of}samples", f"greedy completions are all the same; give objective.{of}temperature"
        if config.distributed.split == "rows" and self.loss == "reward":
            yield "distributed.split", "ranks share the members of a step with rewards; use directions"


# --- what `objective.reward` says: built-in rewards with weights and settings, or one function of the user's own ---

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
