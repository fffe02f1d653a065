"""The settings of the built-in objectives that have more than a name and a loss. Nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from mezo_cli.config.own_code import reward_of
from mezo_cli.config.registry import REWARDS
from mezo_cli.config.schema import ObjectiveConfig, Positive, SettingError
from mezo_cli.config.values import Number
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.rewards.spec import RewardSpec, check_unchanged, parse

if TYPE_CHECKING:
    from mezo_cli.config.schema import Config

NO_REWARD = (
    "no reward is given: add objective.reward=NAME, or a function of your own by objective.reward=FILE.py:function or "
    "MEZO_REWARD (a run does not store it)"
)
NotNegativeNumber = Annotated[Number, Field(ge=0.0)]


@dataclass(frozen=True)
class GenerateConfig(ObjectiveConfig):
    """Settings of objective generate.

    Attributes:
        loss: reward: minus the mean reward of the completions; lm: cross-entropy of the answers' tokens.
        reward: a name, NAME: WEIGHT pairs, `shuffled:NAME`, or a function of one's own (docs/how-to/rewards.md); null:
            none.
        reward_timeout: seconds for the rewards of a batch.
        reward_errors: what a row counts whose reward fails: stop ends the run, zero counts 0.
        max_new_tokens: the most tokens of a completion.
        temperature: 0 for greedy completions, else they are drawn from softmax(logits / temperature).
        samples: completions per prompt and member.
        reduce: what a row's reward is of those of its completions; max: pass@k.
        eval_temperature: the temperature of evaluations.
        eval_samples: completions per prompt of evaluations.
    """

    needs_labels: ClassVar[bool] = False
    differentiable_loss: ClassVar[str] = "lm"

    loss: Literal["reward", "lm"] = "reward"
    reward: Any = None
    reward_timeout: Annotated[Number, Field(gt=0.0, le=1e6)] = 10.0
    reward_errors: Literal["stop", "zero"] = "stop"
    max_new_tokens: Positive = 50
    temperature: NotNegativeNumber = 0.0
    samples: Positive = 1
    reduce: Literal["mean", "max"] = "mean"
    eval_temperature: NotNegativeNumber = 0.0
    eval_samples: Positive = 1

    @property
    def default_metric(self) -> str:
        """The reward, if there is one."""
        return "loss" if self.reward is None and self.loss == "lm" else "reward"

    @property
    def metric_names(self) -> list[str] | None:
        """Not known: a reward names its parts when it is called."""
        return None

    @property
    def shares_rows(self) -> bool:
        """Not with rewards: ranks share the members of a step."""
        return self.loss == "lm"

    @property
    def is_differentiable(self) -> bool:
        """Whether the loss has a gradient."""
        return self.loss == "lm"

    def completion_tokens(self, config: "Config") -> int:
        """Return `max_new_tokens` for a run with a reward or a metric of completions."""
        completes = self.loss == "reward" or reward_of(config) is not None or config.task.metric is not None
        return self.max_new_tokens if completes else 0

    def check(self, config: "Config") -> None:
        """Reject combinations that are individually valid but incompatible.

        Raises:
            SettingError: with the key of one of them.
        """
        task, reward = config.task, reward_of(config)
        if self.loss == "lm" and task.generate.answer is None:
            raise SettingError("objective.loss", f"objective.loss=lm: task '{task.name}' has no task.generate.answer")
        if reward is not None:
            parse(reward)
        if task.metric is not None and task.metric not in REWARDS.names:
            near = did_you_mean(task.metric, REWARDS.names)
            raise SettingError("task.metric", f"task.metric={task.metric}: not one of {join(REWARDS.names)}{near}")
        for key, temperature, samples in (
            ("samples", self.temperature, self.samples),
            ("eval_samples", self.eval_temperature, self.eval_samples),
        ):
            if samples > 1 and temperature == 0:
                other = key.replace("samples", "temperature")
                why = f"greedy completions are all the same; give objective.{other}"
                raise SettingError(f"objective.{key}", f"objective.{key}={samples}: {why}")
        if config.distributed.split == "rows" and self.loss == "reward":
            why = "ranks share the members of a step with rewards"
            raise SettingError("distributed.split", f"distributed.split=rows: {why}; use directions")

    def check_new_run(self, config: "Config") -> None:
        """Open the reward, which checks its file and its arguments.

        Raises:
            UserError: when there is none and the loss needs one, and when it cannot be opened.
        """
        from mezo_cli.rewards.scoring import open_reward  # numpy, which composing a config does not need

        reward = reward_spec(config)
        if reward is not None:
            open_reward(reward).close()
        elif self.loss == "reward":
            raise UserError(f"objective.loss=reward: {NO_REWARD}")

    def check_resumed(self, config: "Config", info: Mapping[str, Any], new_reward: bool) -> None:
        """Reject another reward than the one that the run was trained on; `new_reward` accepts it.

        Raises:
            UserError: for another function.
        """
        reward, recorded = reward_spec(config), info.get("reward")  # nothing is recorded before the first step
        if reward is not None and recorded is not None:
            check_unchanged(reward, recorded["sha256"], new_reward)


def reward_spec(config: "Config") -> RewardSpec | None:
    """Return the reward of a run; None if it has none."""
    reward = reward_of(config)
    return None if reward is None else parse(reward)
