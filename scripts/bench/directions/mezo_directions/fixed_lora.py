"""W + B Q^T with a fixed orthonormal Q, [inputs, r], and a trained B, [outputs, r], which starts from 0.

A direction U of B is the direction U Q^T of W, and since Q is orthonormal and not scaled,

    E[g U Q^T] = G Q Q^T          (G: the gradient of W; MeZO's estimate has E[g Z] = G)

so lr and eps mean what they mean for MeZO, in the subspace of Q: random, or of a file of the inputs' top r directions
(find_bases.py; compare AGZO, arXiv 2601.17261, which renews Q). A fixed Q is a LoRA with A = Q^T: it is saved, resumed,
replayed and exported like one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import nn

from mezo_cli.adapters.methods import Lora
from mezo_cli.config.base import Positive
from mezo_cli.config.schema import PeftConfig
from mezo_cli.errors import UserError


class FixedLoraConfig(PeftConfig):
    """Settings of the method. `targets`, `head`, `layers` and `alpha` are LoRA's, which are not to be chosen here."""

    implementation: ClassVar[str] = "mezo_directions.fixed_lora:FixedLora"
    title: ClassVar[str] = "LoRA with a fixed A"
    targets: ClassVar[str] = "attention_feed_forward"
    head: ClassVar[bool] = False
    layers: ClassVar[None] = None
    r: Positive = Field(8, description="columns of Q, the rank of B Q^T")
    basis: str | None = Field(None, description="the file of Q that find_bases.py has written; null: random columns")

    @property
    def alpha(self) -> int:
        """Return r: B A is not scaled."""
        return self.r


class FixedLora(Lora):
    """A LoRA of every matrix of the layers whose A is orthonormal and stays as it is."""

    config: Any  # a FixedLoraConfig

    def insert(self, loaded: Any, name: str) -> Any:
        """Insert A and B beside the matrices, A with orthonormal rows."""
        wrapped = super().insert(loaded, name)
        path, r = self.config.basis, self.config.r
        if path is not None and not Path(path).is_file():
            raise UserError(f"peft.basis={path}: no such file")
        bases = {} if path is None else load_file(path)
        for layer_name, layer in branches(loaded.model):
            weight = layer.lora_A["default"].weight
            weight.requires_grad_(False)
            if r > weight.shape[1]:
                raise UserError(f"peft.r={r}: {name} has a matrix of {weight.shape[1]} inputs")
            if path is None:
                q = torch.linalg.qr(torch.randn(weight.shape[1], r))[0]
            elif layer_name in bases and bases[layer_name].shape == (weight.shape[1], r):
                q = bases[layer_name]
            else:
                raise UserError(f"peft.basis={path}: no {r} columns for {layer_name} of {name}")
            weight.copy_(q.T)
        return wrapped


def branches(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, layer) of each layer with a LoRA."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module
