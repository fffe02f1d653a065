"""The bias terms alone (BitFit; Zaken et al. 2022, arXiv 2106.10199)."""

from typing import Any

from mezo_cli.adapters.base import (
    LoadedModel,
    PeftMethod,
    classifier_modules,
    first_trained_layer,
    is_below,
    without_targets,
)
from mezo_cli.config.adapters import BiasConfig
from mezo_cli.errors import UserError


class Bias(PeftMethod):
    """The bias terms, of all layers or of the top ones."""

    stands_alone = False
    config: BiasConfig

    def library_config(self, loaded: LoadedModel, name: str) -> Any:
        """Return the library's config."""
        return without_targets(loaded, bias="all", modules_to_save=classifier_modules(loaded))

    def insert(self, loaded: LoadedModel, name: str) -> Any:
        """Let the biases require a gradient, without those below the top layers."""
        if not any(parameter.endswith(".bias") for parameter, _ in loaded.model.named_parameters()):
            raise UserError(f"{name} has no bias terms: peft=bias has nothing to train")
        wrapped = super().insert(loaded, name)
        if self.config.layers is not None:
            first = first_trained_layer(loaded.model, self.config.layers, name)
            for parameter, p in loaded.model.named_parameters():
                if parameter.endswith(".bias") and is_below(parameter, first):
                    p.requires_grad_(False)
        return wrapped
