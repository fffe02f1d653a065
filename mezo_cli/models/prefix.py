"""Prefix tuning: keys and values of its own before every row's, in every layer (Li and Liang 2021, arXiv 2101.00190).

The paper (section 3) starts them from real activations: the keys and values that the model itself gives for some
tokens. They stand in the first positions, and the text behind them, as `peft` reads them again: in a decoder the start
is the very model that has read those tokens first. They enter by the model's own way in for earlier keys and values.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache


class Standing(DynamicCache):
    """Keys and values before every row's own, [1 or rows, heads, length, width]; of a forward nothing is kept."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, [rows, heads, length + tokens, width]."""
        layer: Any = self.layers[layer_idx]
        keys, values = (x.expand(len(key_states), -1, -1, -1) for x in (layer.keys, layer.values))
        return torch.cat((keys, key_states), dim=2), torch.cat((values, value_states), dim=2)


class Prefix:
    """Hands a table of keys and values to every forward of a model's body.

    Args:
        body: what `way_in` found.
        table: an embedding, [length, layers * 2 * heads * width], as `peft` stores a prefix.
        shape: layers, heads, width.
    """

    def __init__(self, body: nn.Module, table: nn.Embedding, shape: tuple[int, int, int]) -> None:
        self._table, self._shape = table, shape
        self._rows = torch.arange(table.num_embeddings, device=table.weight.device)
        self._order = list(inspect.signature(body.forward).parameters)
        body.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, body: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        layers, heads, width = self._shape
        length = len(self._rows)
        given = {**dict(zip(self._order, args, strict=False)), **kwargs}
        sides = len(given["input_ids"]) if "spread" in given else 1  # a packed batch may carry both
        seen = self._table(self._rows.expand(sides, -1)).view(sides, length, layers, 2, heads, width)
        more: dict[str, Any] = {"past_key_values": Standing(list(seen.permute(2, 3, 0, 4, 1, 5)))}
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and mask.dim() == 2:
            more["attention_mask"] = F.pad(mask, (length, 0), value=1)
        if positions is not None:
            more["position_ids"] = positions + length
        return (), {**given, **more}


def way_in(model: nn.Module) -> nn.Module | None:
    """Return the innermost module that takes both tokens and earlier keys and values; None where there is none."""
    wanted = {"input_ids", "past_key_values"}
    taking = [module for module in model.modules() if wanted <= set(inspect.signature(module.forward).parameters)]
    return taking[-1] if taking else None


def activations(body: nn.Module, ids: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return the keys and values that a body gives for tokens, as `peft` stores a prefix, and their shape.

    Args:
        body: what `way_in` found.
        ids: [length].

    Returns:
        [length, layers * 2 * heads * width]; layers, heads, width.
    """
    cache: Any = DynamicCache()
    body(input_ids=ids[None], past_key_values=cache)
    stacked = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])
    layers, _, heads, length, width = stacked.shape  # [layers, 2, heads, length, width]
    return stacked.permute(3, 0, 1, 2, 4).reshape(length, -1), (layers, heads, width)
