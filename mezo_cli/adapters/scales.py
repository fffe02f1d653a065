"""The scales of a quantised base: one factor r per row (QZO; Shang et al. 2025, arXiv 2505.13430).

The scale of a row is its stored scale times r, and r starts at 1: eps and lr are relative to the scales, which differ
by orders of magnitude between matrices. `absolute` trains the scales themselves, as the paper does, with its eps and
lr. A step's update is r <- max(r - lr g z, 0). The paper clips g (optimizer.clip_g=100); its theorem that the estimate
stays unbiased does not hold under clipping.
"""

from typing import Any

from mezo_cli.adapters.base import LoadedModel, PeftMethod, classifier_modules, without_targets
from mezo_cli.config.adapters import ScalesConfig


class Scales(PeftMethod):
    """One factor per row of every quantised matrix."""

    stands_alone = False
    config: ScalesConfig

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
