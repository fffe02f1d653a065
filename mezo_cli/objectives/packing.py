"""Pack the rows of a batch end to end, without padding.

Linear layers are nearly all of the work, and they then compute no padding:

    input_ids   [1, tokens]: the tokens of all rows, row after row; [2, tokens] in a paired forward, one per sign
    attention   pads queries, keys and values to [rows, length], attends within each row, and unpads the output

The models' attention goes through transformers' registry of attention functions. The results are exact: the tests
compare them with the padded forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mezo_cli.objectives.collate import Arrays

ATTENTION = "mezo_packed"  # the name in transformers' registry of what computes packed and padded batches


# --- the model families whose batches are packed: what packing needs to know of each, by transformers' `model_type` ---


@dataclass(frozen=True)
class EncoderFamily:
    """A family of encoders. Its attention goes through transformers' registry of attention functions.

    Attributes:
        last_attention: path of the last layer's attention in the body, {last} for the layer's number. It has the
            modules `self` (with query, key and value) and `output`, as BERT's has.
        positions_follow_padding: whether position ids start after the padding token's id, as RoBERTa's do, not at 0.
    """

    last_attention: str = "encoder.layer.{last}.attention"
    positions_follow_padding: bool = False


class DecoderFamily:
    """A family of decoders: its attention goes through transformers' registry, which is all that packing needs."""


ROBERTA, BERT = EncoderFamily(positions_follow_padding=True), EncoderFamily()


def pack_rows(rows: Sequence[Sequence[int]]) -> Arrays:
    """Lay sequences end to end.

    Return `input_ids`; `rows` and `positions`: the row of each token, and its position in that row, [tokens]; `starts`
    and `lengths` of the rows, [rows].
    """
    lengths = np.array([len(row) for row in rows])
    starts = lengths.cumsum() - lengths
    of_row = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(len(of_row)) - starts[of_row]
    ids = np.concatenate(rows)
    return {"input_ids": ids, "rows": of_row, "positions": positions, "starts": starts, "lengths": lengths}


@dataclass(frozen=True)
class PackedLayout:
    """Where each packed token is in the padded batch.

    Attributes:
        rows, positions: the row of each token, and its position in that row, [tokens].
        mask: which keys each query attends to, bool [rows, 1, length or 1, length]; None when all rows have the same
            length and every token attends to its whole row.
        shape: rows, length.
        read: the packed positions that an encoder's head reads, of which its last layer leaves no others, [rows].
    """

    rows: Tensor
    positions: Tensor
    mask: Tensor | None
    shape: tuple[int, int]
    read: Tensor | None = None

    def pad_input(self, packed: Tensor) -> Tensor:
        """Pad with zeros: [signs, heads, tokens, width] -> [signs * rows, heads, length, width]."""
        tokens = packed.transpose(1, 2)
        signs, heads = tokens.shape[0], tokens.shape[2:]
        if self.mask is None:
            return tokens.reshape(signs * self.shape[0], self.shape[1], *heads).transpose(1, 2)
        padded = tokens.new_zeros(signs, *self.shape, *heads)
        padded[:, self.rows, self.positions] = tokens
        return padded.flatten(0, 1).transpose(1, 2)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_layout: PackedLayout | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend within each row.

    Args:
        query, key, value: [signs, heads, tokens, width] packed, or [rows, heads, length, width] padded. Packed keys and
            values may have fewer heads, and may start with a prefix that every row attends to.
        dropout: the fraction of the attention weights that is dropped; 0 except under backpropagation.
        packed_layout: of a packed batch; None for a padded batch.

    Returns:
        The output, [signs, tokens, heads, width] packed or [rows, length, heads, width] padded, and None.
    """
    layout = packed_layout
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    output = attend(layout.pad_input(query), key, value, layout, dropout, scaling)
    tokens = output.transpose(1, 2).unflatten(0, (len(query), layout.shape[0]))  # [signs, rows, length, heads, width]
    return tokens.flatten(1, 2) if layout.mask is None else tokens[:, layout.rows, layout.positions], None


def attend(
    q: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, dropout: float = 0.0, scaling: float | None = None
) -> Tensor:
    """Attend from padded queries, [signs * rows, heads, positions, width], to packed keys and values."""
    groups = q.shape[1] // key.shape[1]
    if groups > 1:  # several query heads share a head of keys and values
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    signs, rows, prefix_length = key.shape[0], layout.shape[0], key.shape[2] - layout.rows.shape[0]
    k, v = (layout.pad_input(x[:, :, prefix_length:]) for x in (key, value))
    mask = None if layout.mask is None else layout.mask.repeat(signs, 1, 1, 1)
    if prefix_length:
        k = torch.cat((key[:, :, :prefix_length].repeat_interleave(rows, 0), k), dim=2)
        v = torch.cat((value[:, :, :prefix_length].repeat_interleave(rows, 0), v), dim=2)
        mask = None if mask is None else F.pad(mask, (prefix_length, 0), value=True)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scaling)


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # without it a padded batch would get no mask
