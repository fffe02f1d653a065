"""The built-in methods: LoRA, the head, the biases, the scales of a quantised base. (prefix.py has the prefix.)

In `peft`, biases and whole modules are options of a LoRA, here of one of no matrices.
"""

import re
from typing import TYPE_CHECKING, Any

from mezo_cli.adapters.base import PeftMethod, head_modules
from mezo_cli.adapters.settings import BiasConfig, LoraConfig, ScalesConfig
from mezo_cli.errors import UserError

if TYPE_CHECKING:
    from mezo_cli.models import LoadedModel

NO_MATRICES = "dummy-target-modules"  # `peft`'s name for that
# Names of the query and value projections in model families; those of GPT-2 (c_attn) and GPT-NeoX hold the keys too.
QUERY_VALUE = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("c_attn",),
    ("query_key_value",),
)


class WholeModel(PeftMethod):
    """No method: all parameters are trained."""

    stands_alone = False


class Lora(PeftMethod):
    """Low-rank updates B A of frozen matrices (Hu et al. 2022, arXiv 2106.09685; MeZO's paper: r 8, alpha 16).

    They are of the query and value matrices, or of every matrix of a layer. A LoRA is never merged into the base
    weights: forwards with perturbed A and B would then not see the perturbation.
    """

    size_setting = "r"
    config: LoraConfig

    def insert(self, loaded: "LoadedModel", name: str) -> Any:
        """Insert A and B beside the matrices."""
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        config, model = self.config, loaded.model
        matrices = {  # of the numbered layers
            path: module
            for path, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and re.search(r"\.\d+\.", path)
        }
        names, below = sorted({path.rpartition(".")[2] for path in matrices}), r"\d+"
        if config.targets == "query_value":
            names = next((list(pair) for pair in QUERY_VALUE if set(pair) <= set(names)), [])
            below = ""  # by their names, wherever they are
        if names and config.layers is not None:
            top = range(first_trained_layer(model, config.layers, name), model.config.num_hidden_layers)
            below = f"({'|'.join(map(str, top))})"
        targets = rf".*\.{below}\.(.*\.)?({'|'.join(names)})" if names and below else names
        if not targets:
            method = f"peft={config.name} peft.targets={config.targets}"
            other = "; use peft.targets=attention_feed_forward" if matrices and config.targets == "query_value" else ""
            raise UserError(f"{name} is a model family that {method} does not support{other}")
        settings = {"r": config.r, "lora_alpha": config.alpha, "target_modules": targets}
        if config.head and not loaded.model_kind.has_classifier:
            settings["modules_to_save"] = head_modules(loaded)
        transposed = any(isinstance(matrix, Conv1D) for matrix in matrices.values())
        return self.wrap(loaded, fan_in_fan_out=transposed, **settings)


class Head(PeftMethod):
    """The classification head and new poolers, or the head over the vocabulary.

    A copy is trained, so the input embeddings that it may be tied to stay unchanged.
    """

    stands_alone = False

    def insert(self, loaded: "LoadedModel", name: str) -> Any:
        """Copy the head."""
        return self.wrap(loaded, target_modules=NO_MATRICES, modules_to_save=head_modules(loaded))


class Bias(PeftMethod):
    """The bias terms alone, of all layers or of the top ones (BitFit; Zaken et al. 2022, arXiv 2106.10199)."""

    stands_alone = False
    config: BiasConfig

    def insert(self, loaded: "LoadedModel", name: str) -> Any:
        """Let the biases require a gradient, without those below the top layers."""
        if not any(parameter.endswith(".bias") for parameter, _ in loaded.model.named_parameters()):
            raise UserError(f"{name} has no bias terms: peft=bias has nothing to train")
        wrapped = self.wrap(loaded, target_modules=NO_MATRICES, bias="all")
        if self.config.layers is not None:
            first = first_trained_layer(loaded.model, self.config.layers, name)
            for parameter, p in loaded.model.named_parameters():
                number = re.search(r"\.(\d+)\.", parameter)
                is_below = int(number[1]) < first if number else "embed" in parameter
                if parameter.endswith(".bias") and is_below:
                    p.requires_grad_(False)
        return wrapped


class Scales(PeftMethod):
    """The scales of a quantised base: one factor r per row of every matrix (QZO; Shang et al. 2025, arXiv 2505.13430).

    The scale of a row is its stored scale times r, and r starts at 1: eps and lr are relative to the scales, which
    differ by orders of magnitude between matrices. `absolute` trains the scales themselves, as the paper does, with its
    eps and lr. A step's update is r <- max(r - lr g z, 0). The paper clips g (optimizer.clip_g=100); its theorem that
    the estimate stays unbiased does not hold under clipping.
    """

    stands_alone = False
    config: ScalesConfig

    def insert(self, loaded: "LoadedModel", name: str) -> Any:
        """Give each quantised layer its factors; the library has no such method."""
        from mezo_cli.models.quantized import RowFactors, quantized_layers

        wrapped = self.wrap(loaded, target_modules=NO_MATRICES)
        for layer in quantized_layers(loaded.model).values():
            ones = layer.scale.new_ones(layer.out_features)
            layer.rows = RowFactors(layer.scale.flatten().clone() if self.config.absolute else ones)
            if self.config.absolute:  # the factors are the scales, which are then 1 (int8)
                layer.scale = layer.scale.new_ones(layer.scale.shape)  # the stored one may lie in a file
        return wrapped


def first_trained_layer(model: Any, layers: int, name: str) -> int:
    """Return the number of the lowest of the top `layers` layers."""
    count: int = model.config.num_hidden_layers
    if layers > count:
        raise UserError(f"peft.layers={layers}: {name} has {count} layer{'' if count == 1 else 's'}")
    return count - layers
