"""Compute the last layer of a decoder for the read positions only.

After the last layer only the positions that the head reads are needed: the end of each prompt and of each prefix. All
tokens get keys and values there. Queries, the output of attention, norms and the MLP are computed for the read
positions alone. GPT-2 and GPT-NeoX make queries, keys and values by one product, which gives the queries of all tokens.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.objectives.families import DecoderFamily
from mezo_cli.objectives.packing import PackedLayout, attend_from


class LastDecoderLayer:
    """The last layer of a decoder, which computes the positions that `PackedLayout.read` names.

    Not under autograd: dropout would draw another mask than in earlier versions. The forwards of the layer and of its
    attention are replaced for good.
    """

    def __init__(self, layer: nn.Module, family: DecoderFamily) -> None:
        self._family = family
        attention = layer.get_submodule(family.attention)
        # OPT-350m's norm is behind the attention.
        before = getattr(layer, "do_layer_norm_before", True)
        self._norm = layer.get_submodule(family.norm) if before else nn.Identity()
        # The layer's input, [signs, tokens, width], while read positions alone are computed.
        self._states: Tensor | None = None
        layer.forward = partial(self._run, layer.forward)
        attention.forward = partial(self._attend, attention, attention.forward)

    def _run(self, original_forward: Callable[..., Tensor], states: Tensor, *args: Any, **inputs: Any) -> Tensor:
        """Replace the layer's forward: [signs, tokens, width], 0 where nothing is read."""
        layout: PackedLayout | None = inputs.get("packed_layout")
        if layout is None or layout.read is None or torch.is_grad_enabled():
            return original_forward(states, *args, **inputs)
        self._states = states
        try:
            read = original_forward(states[:, layout.read], *args, **inputs)
        finally:
            self._states = None
        # All tokens again, because GPT-2's body restores the shape of its input after the layers.
        return torch.zeros_like(states).index_copy_(1, layout.read, read)

    def _attend(
        self, module: Any, original_forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **inputs: Any
    ) -> Any:
        """Replace the attention's forward: from the read positions, [signs, positions * rows, width], to all tokens."""
        if self._states is None:
            return original_forward(hidden_states, *args, **inputs)
        layout: PackedLayout = inputs["packed_layout"]
        query, key, value = self._project(module, hidden_states, self._norm(self._states), layout)
        if inputs.get("position_embeddings") is not None:
            cos, sin = inputs["position_embeddings"]
            query = _rotate(module, query, cos[:, layout.read], sin[:, layout.read])
            key = _rotate(module, key, cos, sin)
        past = inputs.get("past_key_values", inputs.get("layer_past"))  # a prefix
        if past is not None:
            key, value = past.update(key, value, module.layer_idx)
        output = attend_from(query, key, value, layout, layout.read_mask, module.scaling)
        return getattr(module, self._family.output)(output.flatten(-2)), None

    def _project(self, module: Any, read: Tensor, states: Tensor, layout: PackedLayout) -> tuple[Tensor, ...]:
        """Return queries of the read positions, and keys and values of all tokens, [signs, heads, ..., width]."""
        if self._family.fused is None:
            products = (module.q_proj(read), module.k_proj(states), module.v_proj(states))
            query, key, value = (product.unflatten(-1, (-1, module.head_dim)) for product in products)
            if hasattr(module, "q_norm"):
                query, key = module.q_norm(query), module.k_norm(key)
        else:
            product = getattr(module, self._family.fused)(states)
            if self._family.fuses_by_head:  # the queries, keys and values of a head are neighbours
                query, key, value = product.unflatten(-1, (-1, 3 * module.head_size)).chunk(3, dim=-1)
            else:
                query, key, value = (part.unflatten(-1, (-1, module.head_dim)) for part in product.chunk(3, dim=-1))
            query = query[:, layout.read]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _rotate(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys, [signs, heads, tokens, width], by the family's own function."""
    rotate: Callable[..., tuple[Tensor, Tensor]] = sys.modules[type(module).__module__].apply_rotary_pos_emb
    return rotate(x, x[:, :0], cos, sin)[0]  # it takes both; here queries and keys are of different tokens
