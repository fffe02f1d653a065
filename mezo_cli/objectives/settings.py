"""The settings of the built-in objectives. Nothing here imports torch."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from mezo_cli.config.base import (
    Conflicts,
    NotNegativeNumber,
    Own,
    Positive,
    PositiveNumber,
    own_function,
)
from mezo_cli.config.registry import REWARDS
from mezo_cli.config.schema import Config, ObjectiveConfig, TaskConfig
from mezo_cli.config.stored import reward_of
from mezo_cli.errors import did_you_mean, join
from mezo_cli.rewards.spec import parse_reward


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
