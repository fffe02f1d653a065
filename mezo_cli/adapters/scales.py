"""The scales of a quantised base: one factor r per row (QZO; Shang et al. 2025, arXiv 2505.13430).

The scale of a row is its stored scale times r, and r starts at 1: eps and lr are relative to the scales, which differ
by orders of magnitude between matrices. `absolute` trains the scales themselves, as the paper does, with its eps and
lr. A step's update is r <- max(r - lr g z, 0). The paper clips g (optimizer.clip_g=100); its theorem that the estimate
stays unbiased does not hold under clipping.
"""

from dataclasses import dataclass
from typing import Any

from mezo_cli.adapters.base import LoadedModel, PeftMethod, classifier_modules, without_targets
from mezo_cli.config.registry import OPTIMIZERS
from mezo_cli.config.schema import Config, PeftConfig, SettingError
from mezo_cli.config.values import Flag


@dataclass(frozen=True)
class ScalesConfig(PeftConfig):
    """The scales of a quantised base.

    Attributes:
        absolute: train the scales themselves, as the paper does, in place of factors that start at 1; int8 only.
    """

    absolute: Flag = False


class Scales(PeftMethod):
    """One factor per row of every quantised matrix."""

    title = "QZO"
    settings = ScalesConfig
    stands_alone = False
    config: ScalesConfig

    @classmethod
    def check(cls, config: Config) -> None:
        """Reject a base without scales, and an optimizer that would not keep the factors from 0 on."""
        how, settings = config.model.quantize, config.peft
        if how == "none":
            why = "peft=scales trains the scales of a quantised base; use int8 or nf4"
            raise SettingError("model.quantize", f"model.quantize=none: {why}")
        if getattr(settings, "absolute", False) and how != "int8":
            why = f"model.quantize={how} has no scale per row; use int8, or absolute=false"
            raise SettingError("peft.absolute", f"peft.absolute=true: {why}")
        name = config.optimizer.name
        optimizer = OPTIMIZERS.load(name)
        if not optimizer.replayable or not optimizer.adds_directions(config.optimizer):
            why = "after each step a scale that is negative becomes 0, in the update of optimizer=mezo; use that"
            raise SettingError("optimizer", f"optimizer={name}: peft=scales: {why}")

    def library_config(self, loaded: LoadedModel, name: str) -> Any:
        """Return the library's config: it has no such method."""
        return without_targets(loaded, modules_to_save=classifier_modules(loaded))

    def insert(self, loaded: LoadedModel, name: str) -> Any:
        """Give each quantised layer its factors."""
        from mezo_cli.models.quantized import quantized_layers

        wrapped = super().insert(loaded, name)
        for layer in quantized_layers(loaded.model).values():
            layer.add_factors(self.config.absolute)
        return wrapped
