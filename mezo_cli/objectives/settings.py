"""The settings of the built-in objectives that have more than a name and a loss. Nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from mezo_cli.config.own_code import reward_of
from mezo_cli.config.registry import REWARDS
from mezo_cli.config.schema import ObjectiveConfig, Positive, SettingError, TaskConfig
from mezo_cli.config.values import Number
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.rewards.spec import RewardSpec, describe_change, parse

if TYPE_CHECKING:
    from mezo_cli.config.schema import Config

NO_REWARD = (
    "no reward is given: add objective.reward=NAME, or a function of your own by objective.reward=FILE.py:function or "
    "MEZO_REWARD (a run does not store it)"
)
NotNegativeNumber = Annotated[Number, Field(ge=0.0)]


@dataclass(frozen=True)
class ChoiceConfig(ObjectiveConfig):
    """Settings of objective choice.

    Attributes:
        loss: cross_entropy: over the scores of a row's candidates; lm: cross-entropy of the tokens of the right
            candidates, averaged over all of them in the batch; accuracy: 1 - accuracy, which has no gradient.
        normalize: the score of a candidate is the mean of its tokens' log-probabilities, or their sum.
    """

    needs_labels: ClassVar[bool] = False

    loss: Literal["cross_entropy", "lm", "accuracy"] = "cross_entropy"
    normalize: Literal["mean", "sum"] = "mean"

    @property
    def metric_names(self) -> list[str]:
        """The accuracy alone."""
        return ["accuracy"]

    @property
    def is_differentiable(self) -> bool:
        """Whether the loss has a gradient."""
        return self.loss != "accuracy"

    def data_task(self, task: TaskConfig) -> TaskConfig:
        """Return the task with its labels, which number the candidates; without them where rows list candidates."""
        return task if task.choice.each is None else replace(task, labels=[])

    def check_task(self, task: TaskConfig) -> None:
        """Reject a task without candidates, and labels that do not number them."""
        choice, name = task.choice, f"task '{task.name}'"
        if choice.prompt is None:
            why = f"{name} has no prompt with candidates (objective={self.name})"
            raise SettingError("task.choice.prompt", f"{why}: set task.choice.prompt and .candidates{task.offered}")
        for given, missing in (("each", "right"), ("right", "each")):
            if getattr(choice, given) is not None and getattr(choice, missing) is None:
                why = f"{name}: task.choice.{given} needs task.choice.{missing}"
                raise SettingError(
                    f"task.choice.{missing}", f"{why}: each lists a row's texts, right has the right one"
                )
        count = len(choice.candidates)
        if choice.each is not None and count != 1:
            why = f"{name}: task.choice.candidates has {count} templates; with task.choice.each it needs one"
            raise SettingError("task.choice.candidates", f"{why}, with {{candidate}}")
        if choice.each is None and (count < 2 or count != len(task.labels)):
            why = f"{name}: {count} task.choice.candidates for {len(task.labels)} labels ({join(task.labels)})"
            raise SettingError("task.choice.candidates", f"{why}; give one for each, in the same order, two or more")

    def check(self, config: "Config") -> None:
        """Reject rows whose loss only text that is generated can measure."""
        if config.data.keep is not None:
            why = "objective=choice does not read it, only objective=generate"
            raise SettingError("data.keep", f"data.keep={config.data.keep}: {why}")


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
        """Reject combinations that are individually valid but incompatible."""
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
        """Open the reward, which checks its file and its arguments."""
        from mezo_cli.rewards.scoring import Reward  # numpy, which composing a config does not need

        reward = reward_spec(config)
        if reward is not None:
            Reward(reward).close()
        elif self.loss == "reward":
            raise UserError(f"objective.loss=reward: {NO_REWARD}")

    def describe_change(self, config: "Config", info: Mapping[str, Any]) -> str:
        """Return how the reward's code differs from that which the run was trained on."""
        reward, recorded = reward_spec(config), info.get("reward")  # nothing is recorded before the first step
        return "" if reward is None or recorded is None else describe_change(reward, recorded["sha256"])


def reward_spec(config: "Config") -> RewardSpec | None:
    """Return the reward of a run; None if it has none."""
    reward = reward_of(config)
    return None if reward is None else parse(reward)
