"""The settings of the built-in methods of parameter-efficient fine-tuning, and what implements each."""

from typing import ClassVar, Literal

from pydantic import Field

from mezo_cli.config.base import Conflicts, Flag, Positive
from mezo_cli.config.schema import Config, PeftConfig

LAYERS = "a LoRA, or biases, of the top k layers only; of biases also those above the layers. null: all layers"


class WholeModelConfig(PeftConfig):
    """No method: all parameters are trained."""

    implementation: ClassVar[str] = "mezo_cli.adapters.methods:WholeModel"
    trains_output: ClassVar[bool] = True


class LoraConfig(PeftConfig):
    """Low-rank updates B A of frozen matrices."""

    implementation: ClassVar[str] = "mezo_cli.adapters.methods:Lora"
    title: ClassVar[str] = "LoRA"
    r: Positive = Field(8, description="rank of LoRA's B A")
    alpha: Positive = Field(16, description="LoRA's B A is scaled by alpha / r")
    targets: Literal["query_value", "attention_feed_forward"] = Field(
        "query_value", description="the matrices that get a LoRA: queries and values, or every matrix of the layers"
    )
    head: Flag = Field(False, description="train the head over the vocabulary too; a classification head always is")
    layers: Positive | None = Field(None, description=LAYERS)


class PrefixConfig(PeftConfig):
    """Keys and values before those of the text, in every layer."""

    implementation: ClassVar[str] = "mezo_cli.adapters.prefix:Prefix"
    length: Positive = Field(5, description="tokens of the prefix")


class HeadConfig(PeftConfig):
    """The output head alone."""

    implementation: ClassVar[str] = "mezo_cli.adapters.methods:Head"
    trains_output: ClassVar[bool] = True


class BiasConfig(PeftConfig):
    """The bias terms alone."""

    implementation: ClassVar[str] = "mezo_cli.adapters.methods:Bias"
    layers: Positive | None = Field(None, description=LAYERS)


class ScalesConfig(PeftConfig):
    """The scales of a quantised base."""

    implementation: ClassVar[str] = "mezo_cli.adapters.methods:Scales"
    title: ClassVar[str] = "QZO"
    absolute: Flag = Field(False, description="train the scales themselves, as the paper does, not factors; int8 only")

    def conflicts(self, config: Config) -> Conflicts:
        """Reject a base without scales, and an optimizer that would not keep the factors from 0 on."""
        how, optimizer = config.model.quantize, config.optimizer
        if how == "none":
            yield "model.quantize", "peft=scales trains the scales of a quantised base; use int8 or nf4"
        if self.absolute and how != "int8":
            yield "peft.absolute", f"model.quantize={how} has no scale per row; use int8, or absolute=false"
        if not optimizer.replayable or not optimizer.adds_directions:
            why = "after each step a scale that is negative becomes 0, in the update of optimizer=mezo"
            yield "optimizer", f"peft=scales: {why}; use that"
