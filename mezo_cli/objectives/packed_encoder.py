"""Run an encoder on packed batches, and its head on one position per row.

Supported are the encoders whose position ids and last layer are known (`FAMILIES`). After the last layer's attention
only one position per row is computed, the mask or the first token: the head reads no other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.packing import PackedLayout, pack_rows, packed_logits, use_packed_attention
from mezo_cli.perturb.forward import PerturbedForward

# model_type -> (first position id, from the config; path of the last layer's block after its attention)
FAMILIES = {
    "roberta": (lambda config: config.pad_token_id + 1, "encoder.layer.{last}.attention.output"),
    "xlm-roberta": (lambda config: config.pad_token_id + 1, "encoder.layer.{last}.attention.output"),
    "camembert": (lambda config: config.pad_token_id + 1, "encoder.layer.{last}.attention.output"),
    "bert": (lambda config: 0, "encoder.layer.{last}.attention.output"),
}


class PackedEncoder:
    """An encoder whose forwards compute packed batches.

    Args:
        model: of a family in `FAMILIES`, with a head. Its attention is replaced for good.
        forward: runs it with perturbed weights.
    """

    def __init__(self, model: Any, forward: PerturbedForward) -> None:
        self._model, self._forward = model, forward
        self._first_position = FAMILIES[model.config.model_type][0](model.config)
        self._read_positions: Tensor | None = None  # [rows], in the packed row; None: no forward of ours is running
        use_packed_attention(model)
        _last_block(model).register_forward_pre_hook(self._select_positions)

    def lay_out(self, rows: Sequence[TokenizedExample], read: Sequence[int]) -> Arrays:
        """Pack rows.

        Args:
            rows: the rows.
            read: the position in each row that the head reads.

        Returns:
            The arrays that `logits` finds in `batch.layout`: input_ids, position_ids, token_type_ids, rows and
            positions, [tokens]; is_token, bool [rows, length]; and read, [rows], in the packed row.
        """
        packed = pack_rows([row.input_ids for row in rows])
        return {
            "input_ids": np.concatenate([row.input_ids for row in rows]),
            "position_ids": packed["positions"] + self._first_position,
            "token_type_ids": np.concatenate([row.token_type_ids for row in rows]),
            "rows": packed["rows"],
            "positions": packed["positions"],
            "is_token": np.arange(packed["lengths"].max()) < packed["lengths"][:, None],
            "read": packed["starts"] + read,
        }

    def logits(self, batch: Batch) -> Tensor:
        """Return the head's scores of a batch that `lay_out` packed.

        Returns:
            [rows, labels], or [2, rows, labels] under both signs of a perturbation.
        """
        layout, rows = batch.layout, len(batch.rows)
        mask = layout["is_token"][:, None, None, :]
        shape = (rows, mask.shape[-1])
        even = batch.tokens == mask.numel()  # all rows have the same length
        inputs = {
            "input_ids": layout["input_ids"].unsqueeze(0),
            "position_ids": layout["position_ids"].unsqueeze(0),
            "attention_mask": mask,  # four-dimensional, so transformers makes no mask from it
            "packed_layout": PackedLayout(layout["rows"], layout["positions"], None if even else mask, shape),
        }
        if batch.has_token_type_ids:
            inputs["token_type_ids"] = layout["token_type_ids"].unsqueeze(0)
        self._read_positions = layout["read"]
        logits = packed_logits(self._model, self._forward, inputs)
        return logits.view(self._forward.num_signs, rows, -1).squeeze(0)

    def _select_positions(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the positions that the head reads: [signs, tokens, width] -> [signs * rows, 1, width]."""
        if self._read_positions is None:
            return None
        positions, self._read_positions = self._read_positions, None
        return tuple(hidden[:, positions].flatten(0, 1).unsqueeze(1) for hidden in args)


def is_supported(model: Any) -> bool:
    """Return whether batches for this model can be packed."""
    return model.config.model_type in FAMILIES


def _last_block(model: Any) -> nn.Module:
    """Return the module that gets the last layer's attention output: after it a row's tokens no longer mix."""
    path = FAMILIES[model.config.model_type][1].format(last=model.config.num_hidden_layers - 1)
    return getattr(model, model.base_model_prefix).get_submodule(path)
