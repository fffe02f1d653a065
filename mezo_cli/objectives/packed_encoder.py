"""Run an encoder on packed batches, and its head on one position per row.

Supported are the encoders whose position ids and last layer are known (`FAMILIES`). After the last layer's attention
only one position per row is computed, the mask or the first token: the head reads no other.
"""

from typing import Any

from torch import Tensor, nn

from mezo_cli.objectives.collate import Batch
from mezo_cli.objectives.packing import PackedLayout, packed_logits, use_packed_attention
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
        self._packed: tuple[Batch, dict[str, Any], Tensor] | None = None  # the last batch, and what `pack` returned
        self._read_positions: Tensor | None = None  # [rows], in the packed row; None: no forward of ours is running
        use_packed_attention(model)
        _last_block(model).register_forward_pre_hook(self._select_positions)

    def logits(self, batch: Batch, positions: Tensor) -> Tensor:
        """Return the head's scores.

        Args:
            batch: padded rows.
            positions: the position in each row that the head reads, [rows].

        Returns:
            [rows, labels], or [2, rows, labels] under both signs of a perturbation.
        """
        if self._packed is None or batch is not self._packed[0]:  # a step may ask twice for the same batch
            self._packed = (batch, *pack(self._model, batch.input_ids, batch.attention_mask, batch.token_type_ids))
        _, inputs, starts = self._packed
        self._read_positions = starts + positions
        logits = packed_logits(self._model, self._forward, inputs)
        return logits.view(self._forward.num_signs, len(positions), -1).squeeze(0)

    def _select_positions(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the positions that the head reads: [signs, tokens, width] -> [signs * rows, 1, width]."""
        if self._read_positions is None:
            return None
        positions, self._read_positions = self._read_positions, None
        return tuple(hidden[:, positions].flatten(0, 1).unsqueeze(1) for hidden in args)


def is_supported(model: Any) -> bool:
    """Return whether batches for this model can be packed."""
    return model.config.model_type in FAMILIES


def pack(
    model: Any, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None
) -> tuple[dict[str, Any], Tensor]:
    """Pack a padded batch.

    Args:
        model: gives the family's first position id.
        input_ids, attention_mask, token_type_ids: [rows, length], as for a padded forward.

    Returns:
        The model's keyword arguments, and the index of each row's first token in the packed row, [rows].
    """
    first = FAMILIES[model.config.model_type][0](model.config)
    lengths = attention_mask.sum(dim=1)
    starts = lengths.cumsum(0) - lengths
    real = attention_mask.bool()
    rows, positions = real.nonzero(as_tuple=True)
    mask = real[:, None, None, :]
    shape = (len(input_ids), input_ids.shape[1])
    inputs = {
        "input_ids": input_ids[real].unsqueeze(0),
        "position_ids": (positions + first).unsqueeze(0),
        "attention_mask": mask,  # four-dimensional, so transformers makes no mask from it
        "packed_layout": PackedLayout(rows, positions, None if bool(real.all()) else mask, shape),
    }
    if token_type_ids is not None:
        inputs["token_type_ids"] = token_type_ids[real].unsqueeze(0)
    return inputs, starts


def _last_block(model: Any) -> nn.Module:
    """Return the module that gets the last layer's attention output: after it a row's tokens no longer mix."""
    path = FAMILIES[model.config.model_type][1].format(last=model.config.num_hidden_layers - 1)
    return getattr(model, model.base_model_prefix).get_submodule(path)
