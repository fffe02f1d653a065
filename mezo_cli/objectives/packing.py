"""Batches without padding: rows laid end to end, so that the linear layers, nearly all the work, see real tokens only.

    ids  [1, tokens]    every row's tokens, one row after the other; [2, tokens] for both sides of a step
    attention           alone sees rows: queries, keys and values are spread to [rows, length] and gathered back

Served are the encoders whose position ids and last layer are known (`FAMILIES`); their attention goes through
transformers' own registry of attention functions. In the last layer only one position of each row, the mask or the
first token, is computed beyond the attention: nothing else reaches the head. Everything here is exact: tests hold it
against the padded forward.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mezo_cli.objectives.batches import CARRIED, Batch
from mezo_cli.params import Params

ATTENTION = "mezo_packed"
# model_type -> (first position id, from the config; path of the last layer's block behind its attention)
FAMILIES = {
    "roberta": (lambda config: config.pad_token_id + 1, "encoder.layer.{last}.attention.output"),
    "xlm-roberta": (lambda config: config.pad_token_id + 1, "encoder.layer.{last}.attention.output"),
    "camembert": (lambda config: config.pad_token_id + 1, "encoder.layer.{last}.attention.output"),
    "bert": (lambda config: 0, "encoder.layer.{last}.attention.output"),
}


@dataclass(frozen=True)
class Spread:
    """Where each packed token stands in the padded layout: its row and its place, [tokens] each."""

    rows: Tensor
    places: Tensor
    mask: Tensor | None  # bool [rows, 1, 1, length], true at real tokens; None when no row is shorter than another
    shape: tuple[int, int]

    def out(self, packed: Tensor) -> Tensor:
        """[sides, heads, tokens, width] -> [sides * rows, heads, length, width], zero where there is no token."""
        tokens = packed.transpose(1, 2)
        sides, heads = tokens.shape[0], tokens.shape[2:]
        if self.mask is None:  # rows of one length lie end to end as they are
            return tokens.reshape(sides * self.shape[0], self.shape[1], *heads).transpose(1, 2)
        spaced = tokens.new_zeros(sides, *self.shape, *heads)
        spaced[:, self.rows, self.places] = tokens
        return spaced.flatten(0, 1).transpose(1, 2)

    def back(self, padded: Tensor, sides: int) -> Tensor:
        """[sides * rows, heads, length, width] -> [sides, tokens, heads, width]."""
        tokens = padded.transpose(1, 2).unflatten(0, (sides, self.shape[0]))
        return tokens.flatten(1, 2) if self.mask is None else tokens[:, self.rows, self.places]


class Packed:
    """A served model's forwards of packed batches, of which only one position of each row reaches the head.

    Args:
        model: an encoder with a head, of a family in `FAMILIES`; its attention is replaced for good.
        params: the lens that its weights are seen through.
    """

    def __init__(self, model: Any, params: Params) -> None:
        self._model, self._params = model, params
        self._laid: tuple[Batch, dict[str, Any], Tensor] | None = None  # the last batch, as `pack` laid it
        self._reaching: Tensor | None = None  # [rows], where in the packed row; None: no forward of ours is running
        enable(model)
        block_behind_attention(model).register_forward_pre_hook(self._cut)

    def carries(self, batch: Batch) -> bool:
        """Whether one forward should carry both sides of a step: z is drawn once then, but activations take twice."""
        return self._params.carries and batch.tokens <= CARRIED

    def logits(self, batch: Batch, places: Tensor) -> Tensor:
        """Return the head's scores where each row is read.

        Args:
            batch: padded rows.
            places: the position in each row that its head reads, [rows].

        Returns:
            shape [rows, labels], or [2, rows, labels] where both sides of a step are in force.
        """
        if self._laid is None or batch is not self._laid[0]:  # the step may ask twice for the same batch
            self._laid = (batch, *pack(self._model, batch.ids, batch.attention, batch.segments))
        _, inputs, starts = self._laid
        self._reaching = starts + places
        if self._params.sides == 1:
            return self._model(**inputs).logits.view(len(places), -1)
        with self._params.together():
            return self._model(**of_both(inputs)).logits.view(2, len(places), -1)

    def _cut(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """[sides, tokens, width] -> [sides * rows, 1, width]: rows of one token, as any head reads a padded batch."""
        if self._reaching is None:
            return None
        reaching, self._reaching = self._reaching, None
        return tuple(hidden[:, reaching].flatten(0, 1).unsqueeze(1) for hidden in args)


def serves(model: Any) -> bool:
    """Whether batches for this model can be packed."""
    return model.config.model_type in FAMILIES


def enable(model: Any) -> None:
    """Send the model's attention through `packed_attention`, which serves padded batches too."""
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # else a padded batch would be attended to without its mask
    model.config._attn_implementation = ATTENTION


def block_behind_attention(model: Any) -> nn.Module:
    """Return the module that the last layer's attention output enters: beyond it a row's other tokens count no more."""
    path = FAMILIES[model.config.model_type][1].format(last=model.config.num_hidden_layers - 1)
    return getattr(model, model.base_model_prefix).get_submodule(path)


def pack(model: Any, ids: Tensor, attention: Tensor, segments: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    """Lay a padded batch end to end.

    Args:
        model: gives the family's first position id.
        ids, attention, segments: [rows, length], as for a padded forward.

    Returns:
        The model's keyword arguments, and where each row begins in the packed one, [rows].
    """
    first = FAMILIES[model.config.model_type][0](model.config)
    lengths = attention.sum(dim=1)
    starts = lengths.cumsum(0) - lengths
    real = attention.bool()
    rows, places = real.nonzero(as_tuple=True)
    spread = Spread(rows, places, None if bool(real.all()) else real[:, None, None, :], (len(ids), ids.shape[1]))
    inputs = {
        "input_ids": ids[real].unsqueeze(0),
        "position_ids": (places + first).unsqueeze(0),
        "attention_mask": real[:, None, None, :],  # four-dimensional: no mask is made of it
        "spread": spread,
    }
    if segments is not None:
        inputs["token_type_ids"] = segments[real].unsqueeze(0)
    return inputs, starts


def of_both(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a packed batch's arguments for a forward that carries both sides of a step."""
    return {key: torch.cat([value] * 2) if isinstance(value, Tensor) else value for key, value in inputs.items()}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    spread: Spread | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each row.

    Args:
        module: the attention layer (unused).
        query, key, value: [sides, heads, tokens, width] packed, or [rows, heads, length, width] padded. Keys and values
            may hold more than the queries' tokens, in front: a prefix, which every row sees.
        attention_mask: of a padded batch; None where nothing is padded.
        scaling: of the scores; 1 / sqrt(width) when None.
        dropout: the share of the attention weights that is dropped: 0 but for backpropagation.
        spread: the layout of a packed batch; None for a padded batch.

    Returns:
        The output, [sides, tokens, heads, width] packed or [rows, length, heads, width] padded, and None.
    """
    if spread is None:
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    sides, prefix = len(query), key.shape[2] - query.shape[2]
    q, k, v = spread.out(query), spread.out(key[:, :, prefix:]), spread.out(value[:, :, prefix:])
    mask = None if spread.mask is None else spread.mask.repeat(sides, 1, 1, 1)
    if prefix:
        rows = spread.shape[0]
        k = torch.cat((key[:, :, :prefix].repeat_interleave(rows, 0), k), dim=2)
        v = torch.cat((value[:, :, :prefix].repeat_interleave(rows, 0), v), dim=2)
        mask = None if mask is None else F.pad(mask, (prefix, 0), value=True)
    return spread.back(F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scaling), sides), None
