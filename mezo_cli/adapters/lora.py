"""Low-rank updates B A of frozen matrices (Hu et al. 2022, arXiv 2106.09685; MeZO's paper: r 8, alpha 16).

A LoRA is never merged into the base weights: forwards with perturbed A and B would then not see the perturbation.
"""

import re
from typing import Any

from mezo_cli.adapters.base import LoadedModel, PeftMethod, classifier_modules, first_trained_layer, head_modules
from mezo_cli.config.adapters import LoraConfig
from mezo_cli.errors import UserError

# Names of the query and value projections in model families; those of GPT-2 (c_attn) and GPT-NeoX hold the keys too.
QUERY_VALUE = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("c_attn",),
    ("query_key_value",),
)


class Lora(PeftMethod):
    """LoRA, of the query and value matrices or of every matrix of a layer."""

    size_setting = "r"
    config: LoraConfig

    def library_config(self, loaded: LoadedModel, name: str) -> Any:
        """Return the library's config, with the matrices that get a LoRA."""
        import peft
        from transformers.pytorch_utils import Conv1D

        config, matrices = self.config, _layer_matrices(loaded.model)
        targets = self._targets(loaded.model, sorted({path.rpartition(".")[2] for path in matrices}), name)
        if not targets:
            method = f"peft={config.name} peft.targets={config.targets}"
            raise UserError(f"{name} is a model family that {method} does not support")
        return peft.LoraConfig(
            task_type=loaded.model_kind.task_type,
            r=config.r,
            lora_alpha=config.alpha,
            target_modules=targets,
            modules_to_save=classifier_modules(loaded) or (head_modules(loaded) if config.head else None),
            fan_in_fan_out=any(isinstance(matrix, Conv1D) for matrix in matrices.values()),
        )

    def _targets(self, model: Any, matrices: list[str], name: str) -> list[str] | str:
        """Return the names of the matrices that get a LoRA, or a pattern of their paths; empty if there are none."""
        if self.config.targets == "attention_feed_forward":
            names, below = matrices, r"\d+"
        else:
            names = next((list(pair) for pair in QUERY_VALUE if set(pair) <= set(matrices)), [])
            below = ""  # by their names, wherever they are
        if names and self.config.layers is not None:
            top = range(first_trained_layer(model, self.config.layers, name), model.config.num_hidden_layers)
            below = f"({'|'.join(map(str, top))})"
        return rf".*\.{below}\.(.*\.)?({'|'.join(names)})" if names and below else names


def _layer_matrices(model: Any) -> dict[str, Any]:
    """Return path -> linear module, for all inside the numbered layers."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and re.search(r"\.\d+\.", path)
    }
