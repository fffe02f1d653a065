"""What a name in the config stands for: a built-in class or function, or one that another package registers.

A table maps names to `module:attribute`, so that the names are known without importing what they stand for. Packages
add to a table by an entry point of its group (`mezo.optimizers`, `mezo.objectives`, ...).
"""

import importlib
from collections.abc import Mapping
from functools import cached_property
from importlib import metadata
from typing import Any

from mezo_cli.config import schema
from mezo_cli.errors import UserError, did_you_mean, join


class Registry:
    """The choices of one config key.

    Args:
        key: the config key that names the choice, for error lines: `optimizer`.
        built_in: name -> `module:attribute`.
        group: the entry-point group by which other packages add choices; None where they cannot.
    """

    def __init__(self, key: str, built_in: Mapping[str, str], group: str | None = None) -> None:
        self.key, self.built_in, self.group = key, dict(built_in), group

    @cached_property
    def targets(self) -> dict[str, str]:
        """Map every name to its `module:attribute`; a built-in name cannot be replaced."""
        added = metadata.entry_points(group=self.group) if self.group else ()
        return {**{point.name: point.value for point in added}, **self.built_in}

    @property
    def names(self) -> list[str]:
        """List the names, the built-in ones first."""
        return [*self.built_in, *sorted(set(self.targets) - set(self.built_in))]

    def load(self, name: str) -> Any:
        """Import and return what a name stands for."""
        if name not in self.targets:
            raise UserError(f"{self.key}={name}: allowed are {join(self.names)}{did_you_mean(name, self.names)}")
        module, _, attribute = self.targets[name].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a plug-in may raise anything
            if name in self.built_in:
                raise
            raise UserError(
                f"{self.key}={name}: the plug-in {self.targets[name]} cannot be imported: {error}"
            ) from error


OPTIMIZERS = Registry(
    "optimizer",
    {
        "mezo": "mezo_cli.optim.mezo:Mezo",
        "mezo_momentum": "mezo_cli.optim.mezo_momentum:MezoMomentum",
        "mezo_adam": "mezo_cli.optim.mezo_adam:MezoAdam",
        "lozo": "mezo_cli.optim.lozo:Lozo",
        "lozo_m": "mezo_cli.optim.lozo_m:LozoM",
        "hizoo": "mezo_cli.optim.hizoo:Hizoo",
        "hizoo_scalar": "mezo_cli.optim.hizoo_scalar:HizooScalar",
        "adamezo": "mezo_cli.optim.adamezo:AdaMezo",
        "null_signs": "mezo_cli.optim.null_signs:NullSigns",
        "es": "mezo_cli.optim.es:Es",
        "fzoo": "mezo_cli.optim.es:Fzoo",
        "adamw": "mezo_cli.optim.first_order:AdamW",
        "sgd": "mezo_cli.optim.first_order:Sgd",
        "linear_probe": "mezo_cli.optim.linear_probe:LinearProbe",
    },
    "mezo.optimizers",
)
OBJECTIVES = Registry(
    "objective",
    {
        "mlm": "mezo_cli.objectives.encoders:Mlm",
        "cls": "mezo_cli.objectives.encoders:Cls",
        "lm": "mezo_cli.objectives.lm:Lm",
        "choice": "mezo_cli.objectives.choice:Choice",
        "generate": "mezo_cli.objectives.generation:Generation",
    },
    "mezo.objectives",
)
OBJECTIVE_SETTINGS = Registry(
    "objective",
    {
        "choice": "mezo_cli.objectives.settings:ChoiceConfig",
        "generate": "mezo_cli.objectives.settings:GenerateConfig",
    },
)
LOSSES = Registry(
    "objective.loss",
    {
        "cross_entropy": "mezo_cli.objectives.scoring:cross_entropy",
        "accuracy": "mezo_cli.objectives.scoring:accuracy_loss",
        "f1": "mezo_cli.objectives.scoring:f1_loss",
    },
    "mezo.losses",
)
METRICS = Registry(
    "task.metric",
    {
        "accuracy": "mezo_cli.objectives.scoring:accuracy",
        "f1": "mezo_cli.objectives.scoring:f1",
        "matthews": "mezo_cli.objectives.scoring:matthews",
    },
    "mezo.metrics",
)
REWARDS = Registry(
    "objective.reward",
    {
        "exact": "mezo_cli.rewards.built_in:exact",
        "em": "mezo_cli.rewards.built_in:em",
        "f1": "mezo_cli.rewards.built_in:f1",
        "contains": "mezo_cli.rewards.built_in:contains",
        "number": "mezo_cli.rewards.built_in:number",
        "format": "mezo_cli.rewards.built_in:Format",
        "length": "mezo_cli.rewards.built_in:Length",
        "countdown": "mezo_cli.rewards.built_in:Countdown",
    },
    "mezo.rewards",
)
PEFT = Registry(
    "peft",
    {
        "none": "mezo_cli.adapters.base:WholeModel",
        "lora": "mezo_cli.adapters.lora:Lora",
        "prefix": "mezo_cli.adapters.prefix:Prefix",
        "head": "mezo_cli.adapters.head:Head",
        "bias": "mezo_cli.adapters.bias:Bias",
        "scales": "mezo_cli.adapters.scales:Scales",
    },
    "mezo.peft",
)
SOURCES = Registry(
    "data",
    {
        "hub": "mezo_cli.config.schema:DataConfig",
        "files": "mezo_cli.config.schema:FilesConfig",
        "demo": "mezo_cli.config.schema:DataConfig",
    },
)
ENGINES = Registry(
    "engine",
    {
        "none": "mezo_cli.config.schema:EngineConfig",
        "vllm": "mezo_cli.config.schema:VllmConfig",
        "openai": "mezo_cli.config.schema:OpenAiConfig",
    },
)
ENGINE_OBJECTIVES = Registry(  # what lets an engine compute the forwards of an objective
    "engine",
    {
        "lm": "mezo_cli.engine.scores:EngineScores",
        "choice": "mezo_cli.engine.scores:EngineChoices",
        "generate": "mezo_cli.engine.answers:EngineAnswers",
    },
)
ENCODER_FAMILIES = Registry(  # by transformers' model_type; other families get padded batches
    "model_type",
    {
        "roberta": "mezo_cli.objectives.families:ROBERTA",
        "xlm-roberta": "mezo_cli.objectives.families:ROBERTA",
        "camembert": "mezo_cli.objectives.families:ROBERTA",
        "bert": "mezo_cli.objectives.families:BERT",
    },
    "mezo.encoder_families",
)
DECODER_FAMILIES = Registry(
    "model_type",
    dict.fromkeys(
        ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox"), "mezo_cli.objectives.families:DecoderFamily"
    ),
    "mezo.decoder_families",
)
NOISES = Registry(
    "optimizer.noise",
    {
        "gaussian": "mezo_cli.perturb.noise.gaussian:gaussian_noise",
        "rademacher": "mezo_cli.perturb.noise.rademacher:rademacher_noise",
        "torch": "mezo_cli.perturb.noise.torch_stream:TorchNoise",
    },
)
LOGGERS = Registry(
    "logger",
    {
        "tensorboard": "mezo_cli.training.loggers.tensorboard:TensorBoardLogger",
        "wandb": "mezo_cli.training.loggers.wandb:WandbLogger",
        "trackio": "mezo_cli.training.loggers.trackio:TrackioLogger",
    },
    "mezo.loggers",
)

# The groups whose settings depend on the choice: the class that all of them share -> the choices.
CHOICES: dict[type, Registry] = {
    schema.OptimizerConfig: OPTIMIZERS,
    schema.ObjectiveConfig: OBJECTIVES,
    schema.PeftConfig: PEFT,
    schema.DataConfig: SOURCES,
    schema.EngineConfig: ENGINES,
}
NAMES = {  # keys whose value is a name in a table
    **{f"{registry.key}.name": registry for registry in CHOICES.values()},
    "objective.loss": LOSSES,  # unless the objective lists losses of its own
    "optimizer.noise": NOISES,
    "logger.names": LOGGERS,
}


def settings_class(base: type, name: str) -> Any:
    """Return the class of the settings of a choice: the choice itself, or what it declares as `settings`.

    Args:
        base: the class that all choices of the group share: `OptimizerConfig`.
        name: the choice.
    """
    if base is schema.ObjectiveConfig and name in OBJECTIVES.built_in:  # their modules import torch
        return OBJECTIVE_SETTINGS.load(name) if name in OBJECTIVE_SETTINGS.built_in else base
    choice = CHOICES[base].load(name)
    return choice if isinstance(choice, type) and issubclass(choice, base) else getattr(choice, "settings", base)


def readers(base: type, setting: str) -> list[str]:
    """Return the choices of a group that have a setting; a plug-in that cannot be imported is left out."""
    return [name for name, settings_type in classes(base).items() if setting in settings_type.__dataclass_fields__]


def classes(base: type) -> dict[str, Any]:
    """Return the class of each choice of a group by its name; a plug-in that cannot be imported is left out."""
    by_name = {}
    for name in CHOICES[base].names:
        try:
            by_name[name] = settings_class(base, name)
        except UserError:  # it is reported when it is chosen
            continue
    return by_name
