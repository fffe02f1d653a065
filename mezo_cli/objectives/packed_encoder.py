"""Run an encoder on packed batches, and its head on one position per row.

Supported are the encoders whose position ids and last layer are known (families.py). The head reads one position per
row, the mask or the first token. So in the last layer all tokens get keys and values, and only these positions get
queries and what follows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.families import EncoderFamily, find_encoder_family
from mezo_cli.objectives.frozen_layers import FrozenLayers
from mezo_cli.objectives.packing import PackedLayout, attend_from, pack_rows, packed_logits, use_packed_attention
from mezo_cli.perturb.forward import PerturbedForward


class PackedEncoder:
    """An encoder with a head whose forwards compute packed batches. Its attention is replaced for good."""

    def __init__(self, model: Any, forward: PerturbedForward, family: EncoderFamily) -> None:
        self._model, self._forward = model, forward
        self._first_position = family.first_position(model.config)
        self._read_positions: Tensor | None = None  # [rows], in the packed row; None: no forward of ours is running
        self.frozen = FrozenLayers(model, forward)
        use_packed_attention(model)
        last = family.last_attention.format(last=model.config.num_hidden_layers - 1)
        attention: Any = getattr(model, model.base_model_prefix).get_submodule(last)
        attention.self.forward = partial(self._attend, attention.self, attention.self.forward)
        attention.output.register_forward_pre_hook(self._select_residual)

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays:
        """Pack rows. The head reads the position of each that is scored, or its first one.

        Returns:
            The arrays that `logits` finds in `batch.layout`: input_ids, position_ids, token_type_ids, rows and
            positions, [tokens]; is_token, bool [rows, length]; and scored_positions, [rows], in the packed row.
        """
        packed = pack_rows([row.input_ids for row in rows])
        return {
            "input_ids": np.concatenate([row.input_ids for row in rows]),
            "position_ids": packed["positions"] + self._first_position,
            "token_type_ids": np.concatenate([row.token_type_ids for row in rows]),
            "rows": packed["rows"],
            "positions": packed["positions"],
            "is_token": np.arange(packed["lengths"].max()) < packed["lengths"][:, None],
            "scored_positions": packed["starts"] + [max(row.position, 0) for row in rows],
        }

    def logits(self, batch: Batch) -> Tensor:
        """Return the head's scores of a batch that `lay_out` packed.

        Returns:
            [rows, labels], or [2, rows, labels] under both signs of a perturbation.
        """
        try:
            logits = packed_logits(self._model, self._forward, self.frozen, batch, self._inputs)
        finally:
            self._read_positions = None
        return logits.view(self._forward.num_signs, len(batch.rows), -1).squeeze(0)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the model's keyword arguments for a batch, whose read positions the forward then selects."""
        layout, rows = batch.layout, len(batch.rows)
        mask = layout["is_token"][:, None, None, :]
        shape = (rows, mask.shape[-1])
        even = batch.tokens == mask.numel()  # all rows have the same length
        inputs: dict[str, Any] = {
            "input_ids": layout["input_ids"].unsqueeze(0),
            "position_ids": layout["position_ids"].unsqueeze(0),
            "attention_mask": mask,  # four-dimensional, so transformers makes no mask from it
            "packed_layout": PackedLayout(layout["rows"], layout["positions"], None if even else mask, shape),
        }
        if batch.has_token_type_ids:
            inputs["token_type_ids"] = layout["token_type_ids"].unsqueeze(0)
        self._read_positions = layout["scored_positions"]
        return inputs

    def _attend(
        self,
        module: Any,
        original_forward: Callable[..., Any],
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **inputs: Any,
    ) -> Any:
        """Replace the last layer's attention: attend from the read positions alone, [signs, rows, width].

        Not under autograd: dropout would draw another mask than in earlier versions.
        """
        if self._read_positions is None or torch.is_grad_enabled():
            return original_forward(hidden_states, attention_mask, past_key_values, **inputs)
        read = hidden_states[:, self._read_positions]
        query, key, value = (
            project(states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)
            for project, states in ((module.query, read), (module.key, hidden_states), (module.value, hidden_states))
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        layout: PackedLayout = inputs["packed_layout"]
        output = attend_from(query, key, value, layout, layout.mask, module.scaling)
        return output.flatten(-2), None

    def _select_residual(self, module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Keep the positions that the head reads: [signs, tokens, width] -> [signs * rows, 1, width]."""
        if self._read_positions is None:
            return None
        attended, residual = args
        if torch.is_grad_enabled():
            attended = attended[:, self._read_positions]
        residual = residual[:, self._read_positions]
        return attended.flatten(0, 1).unsqueeze(1), residual.flatten(0, 1).unsqueeze(1)


def pack_encoder(model: Any, forward: PerturbedForward) -> PackedEncoder | None:
    """Return the model as one whose forwards compute packed batches; None for a family that is not supported."""
    family = find_encoder_family(model)
    return None if family is None else PackedEncoder(model, forward, family)
