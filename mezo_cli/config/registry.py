"""What a name in the config stands for: a built-in thing, or one that another package registers.

A table maps names to `module:attribute`, so that the names are known without importing what they stand for. Packages
add to a table by an entry point of its group (`mezo.optimizers`, `mezo.objectives`, ...), mezo's own methods (methods/)
too. What a choice stands for is its class of settings, which names its implementation.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from typing import Any

from mezo_cli.config.base import SettingError, refused
from mezo_cli.errors import UserError, did_you_mean, join


@cache
def plug_ins(of_mezo: bool) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points for mezo that other packages have, or mezo's own: what these add counts as built in."""
    points = metadata.entry_points()
    found = [point for group in points.groups if group.startswith("mezo.") for point in points.select(group=group)]
    return tuple(sorted(point for point in found if point.value.startswith("mezo_cli.") == of_mezo))


@dataclass(frozen=True, eq=False)
class Registry:
    """The choices of one config key."""

    key: str  # the config key that names the choice, for error lines: `optimizer`
    rows: dict[str, str]  # name -> `module:attribute`
    group: str | None = None  # the entry-point group by which packages add choices; None where they cannot

    @cached_property
    def built_in(self) -> dict[str, str]:
        """Map the project's own names, those of entry points last, to their `module:attribute`."""
        return self.rows | {point.name: point.value for point in plug_ins(of_mezo=True) if point.group == self.group}

    @cached_property
    def targets(self) -> dict[str, str]:
        """Map every name to its `module:attribute`; a built-in name cannot be replaced."""
        added = [point for point in plug_ins(of_mezo=False) if point.group == self.group]
        return {point.name: point.value for point in added} | self.built_in

    @property
    def names(self) -> list[str]:
        """List the names, the built-in ones first."""
        return [*self.built_in, *sorted(set(self.targets) - set(self.built_in))]

    def load(self, name: str) -> Any:
        """Import and return what a name stands for."""
        if name not in self.targets:
            raise SettingError(self.key, f"{self.key}{self._not_one(name)}")
        return self._import(name, self.targets[name])

    def implementation(self, name: str) -> Any:
        """Import and return what implements a choice, as its class of settings says."""
        return self._import(name, self.load(name).implementation)

    def _import(self, name: str, target: str) -> Any:
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a plug-in may raise anything
            if name in self.built_in:
                raise
            why = f"the plug-in {target} cannot be imported: {error}"
            raise SettingError(self.key, f"{self.key}={name}: {why}") from error

    def check(self, name: str) -> str:
        """Return a name that is in the table: a validator of a field."""
        if name not in self.targets:
            raise refused(self._not_one(name))
        return name

    def _not_one(self, name: str) -> str:
        return f"={name}: not one of {join(self.names)}{did_you_mean(str(name), self.names)}"

    def all(self, plug_ins: bool = True) -> Iterator[tuple[str, Any]]:
        """Yield every name with what it stands for, the built-in ones first; plug-ins that cannot be imported not."""
        for name in self.names if plug_ins else self.built_in:
            try:
                yield name, self.load(name)
            except UserError:  # it is reported when it is chosen
                continue


def _of(module: str, **attributes: str) -> dict[str, str]:
    return {name: f"mezo_cli.{module}:{attribute}" for name, attribute in attributes.items()}


OPTIMIZERS = Registry(
    "optimizer",
    _of("config.optimizers", mezo="MezoConfig", mezo_momentum="MezoMomentumConfig", mezo_adam="MezoAdamConfig")
    | _of("config.optimizers", null_signs="NullSignsConfig", es="EsConfig", fzoo="FzooConfig", adamw="AdamWConfig")
    | _of("config.optimizers", sgd="SgdConfig", linear_probe="LinearProbeConfig"),
    "mezo.optimizers",
)
OBJECTIVES = Registry(
    "objective",
    _of("objectives.settings", mlm="MlmConfig", cls="ClsConfig", lm="LmConfig")
    | _of("objectives.settings", choice="ChoiceConfig", generate="GenerateConfig"),
    "mezo.objectives",
)
PEFT = Registry(
    "peft",
    _of("adapters.settings", none="WholeModelConfig", lora="LoraConfig", prefix="PrefixConfig")
    | _of("adapters.settings", head="HeadConfig", bias="BiasConfig", scales="ScalesConfig"),
    "mezo.peft",
)
SOURCES = Registry("data", _of("config.schema", hub="DataConfig", files="FilesConfig", demo="DataConfig"))
ENGINES = Registry("engine", _of("config.schema", none="EngineConfig", vllm="VllmConfig", openai="OpenAiConfig"))
CHOICES = {table.key: table for table in (OPTIMIZERS, OBJECTIVES, PEFT, SOURCES, ENGINES)}  # whose settings differ

LOSSES = Registry(
    "objective.loss",
    _of("objectives.scoring", cross_entropy="cross_entropy", accuracy="accuracy_loss", f1="f1_loss"),
    "mezo.losses",
)
METRICS = Registry(
    "task.metric", _of("objectives.scoring", accuracy="accuracy", f1="f1", matthews="matthews"), "mezo.metrics"
)
REWARDS = Registry(
    "objective.reward",
    _of("rewards.built_in", exact="exact", em="em", f1="f1", contains="contains", number="number")
    | _of("rewards.built_in", format="Format", length="Length", countdown="Countdown"),
    "mezo.rewards",
)
ENGINE_OBJECTIVES = Registry(  # what lets an engine compute the forwards of an objective
    "engine",
    _of("engine.objectives", lm="EngineScores", choice="EngineScores", generate="EngineAnswers"),
)
# By transformers' model_type; encoders of other families get padded batches.
ENCODER_FAMILIES = Registry(
    "model_type",
    dict.fromkeys(("roberta", "xlm-roberta", "camembert"), "mezo_cli.objectives.packing:ROBERTA")
    | _of("objectives.packing", bert="BERT"),
    "mezo.encoder_families",
)
DECODER_FAMILIES = Registry(
    "model_type",
    dict.fromkeys(
        ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox"), "mezo_cli.objectives.packing:DecoderFamily"
    ),
    "mezo.decoder_families",
)
NOISES = Registry(
    "optimizer.noise",
    _of("perturb.noise.counter", gaussian="gaussian_noise", rademacher="rademacher_noise")
    | _of("perturb.noise.torch_stream", torch="TorchNoise"),
)
LOGGERS = Registry(
    "logger",
    _of("training.loggers.tensorboard", tensorboard="TensorBoardLogger")
    | _of("training.loggers.trackers", wandb="WandbLogger", trackio="TrackioLogger"),
    "mezo.loggers",
)
