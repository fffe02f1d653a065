"""Prefix tuning: trainable keys and values before those of the text, in every layer (Li and Liang 2021, 2101.00190).

As in the paper (section 3), the prefix starts from real activations: the keys and values that the model computes for
some tokens. It takes the first positions and the text those after it, as `peft` loads it again. So in a decoder the
initial prefix is exactly the model that has read those tokens.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from mezo_cli.adapters.base import PeftMethod
from mezo_cli.adapters.settings import PrefixConfig
from mezo_cli.errors import UserError
from mezo_cli.models import LoadedModel


class Prefix(PeftMethod):
    """Prefix tuning, from the keys and values of tokens drawn from the vocabulary."""

    library = "PrefixTuningConfig"
    size_setting = "length"
    merges = False
    config: PrefixConfig

    def insert(self, loaded: LoadedModel, name: str) -> Any:
        """Insert the table of keys and values, which the model's forwards then get as `past_key_values`."""
        model, tokenizer, length = loaded.model, loaded.tokenizer, self.config.length
        words = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        ids = torch.tensor(words)[torch.randint(len(words), (length,))].to(loaded.device)
        wanted = {"input_ids", "past_key_values"}
        bodies = [one for one in model.modules() if wanted <= set(inspect.signature(one.forward).parameters)]
        if not bodies:
            raise UserError(
                f"{name} is a model family that peft=prefix does not support: it takes no past_key_values; use "
                "peft=lora, or a model like RoBERTa, BERT, OPT, GPT-2 or Llama"
            )
        if length >= tokenizer.model_max_length:
            raise UserError(
                f"peft.length={length}: {name} takes {tokenizer.model_max_length} tokens, so none would be left for "
                "the text"
            )
        cache: Any = DynamicCache()
        with torch.no_grad():
            bodies[-1](input_ids=ids[None], past_key_values=cache)  # the innermost
        stacked = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])
        layers, _, heads, _, width = stacked.shape  # [layers, 2, heads, length, width]
        key_values = stacked.permute(3, 0, 1, 2, 4).reshape(length, -1)  # as `peft` stores a prefix
        wrapped = self.wrap(
            loaded,
            task_type=loaded.model_kind.task_type or "FEATURE_EXTRACTION",  # None: peft's forward ignores the prefix
            num_virtual_tokens=length,
            num_layers=layers,
            num_attention_heads=heads,
            token_dim=heads * width,
            num_transformer_submodules=1,
        )
        encoder: Any = wrapped.prompt_encoder["default"]
        encoder.load_prompt_embeddings(key_values)
        PrefixInput(bodies[-1], encoder.embedding, (layers, heads, width))
        model.add_module("prefix", encoder.embedding)  # gives its parameter a name in the model
        tokenizer.model_max_length -= length
        return wrapped


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
        body: the innermost module that takes `past_key_values`.
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
        rows, cache = len(inputs["input_ids"]), inputs.get("past_key_values")
        changed: dict[str, Any] = {}
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
