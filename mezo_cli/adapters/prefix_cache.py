"""Pass the keys and values of a prefix to a model's forwards, as `past_key_values`; compute its initial ones."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache


class FixedPrefixCache(DynamicCache):
    """Keys and values of a prefix, [1 or rows, heads, length, width]. The text's own are not kept."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of prefix and text, [rows, heads, length + tokens, width]."""
        layer: Any = self.layers[layer_idx]
        keys, values = (x.expand(len(key_states), -1, -1, -1) for x in (layer.keys, layer.values))
        return torch.cat((keys, key_states), dim=2), torch.cat((values, value_states), dim=2)


class PrefixInput:
    """Passes a table of keys and values to every forward of a model's body.

    Args:
        body: the module that `find_cached_forward` returned.
        table: an embedding, [length, layers * 2 * heads * width], as `peft` stores a prefix.
        shape: layers, heads, width.
    """

    def __init__(self, body: nn.Module, table: nn.Embedding, shape: tuple[int, int, int]) -> None:
        self._table, self._shape = table, shape
        self._rows = torch.arange(table.num_embeddings, device=table.weight.device)
        self._parameters = list(inspect.signature(body.forward).parameters)
        body.register_forward_pre_hook(self._add_prefix, with_kwargs=True)

    def _add_prefix(self, body: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        length = len(self._rows)
        inputs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        rows = len(inputs["input_ids"])
        changed: dict[str, Any] = {}
        cache = inputs.get("past_key_values")
        if cache is None:  # a packed batch may hold both signs, one per row
            changed["past_key_values"] = FixedPrefixCache(self._key_values(rows if "packed_layout" in inputs else 1))
        elif cache.get_seq_length() == 0:  # of a generation: the text's keys and values follow the prefix's
            for index, (keys, values) in enumerate(self._key_values(rows)):
                cache.update(keys, values, index)
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if mask is not None and mask.dim() == 2:
            changed["attention_mask"] = F.pad(mask, (length, 0), value=1)
        if positions is not None:
            changed["position_ids"] = positions + length
        return (), {**inputs, **changed}

    def _key_values(self, rows: int) -> list[Any]:
        """Return the prefix's keys and values in each layer, [2, rows, heads, length, width]."""
        layers, heads, width = self._shape
        values = self._table(self._rows.expand(rows, -1)).view(rows, len(self._rows), layers, 2, heads, width)
        return list(values.permute(2, 3, 0, 4, 1, 5))


def find_cached_forward(model: nn.Module) -> nn.Module | None:
    """Return the innermost module whose forward takes input_ids and past_key_values, or None."""
    wanted = {"input_ids", "past_key_values"}
    modules = [module for module in model.modules() if wanted <= set(inspect.signature(module.forward).parameters)]
    return modules[-1] if modules else None


def compute_key_values(body: nn.Module, ids: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return the keys and values that a body computes for tokens, in the layout in which `peft` stores a prefix.

    Args:
        body: the module that `find_cached_forward` returned.
        ids: [length].

    Returns:
        [length, layers * 2 * heads * width]; and (layers, heads, width).
    """
    cache: Any = DynamicCache()
    body(input_ids=ids[None], past_key_values=cache)
    stacked = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])
    layers, _, heads, length, width = stacked.shape  # [layers, 2, heads, length, width]
    return stacked.permute(3, 0, 1, 2, 4).reshape(length, -1), (layers, heads, width)
