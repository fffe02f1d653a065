"""Collate tokenized rows into one padded batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezo_cli.config.schema import TokenizedExample

# The most tokens of a batch for which one forward computes both signs of a step. In larger batches drawing z is a small
# part of the step, and the activations of two forwards are a large part of the memory.
MAX_PAIRED_TOKENS = 1024


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to the longest of them.

    Attributes:
        input_ids, attention_mask: [rows, length], int64.
        token_type_ids: [rows, length]; None for a model without them.
        positions: the token of each row whose hidden state is scored, [rows].
        labels: [rows].
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    positions: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        """The number of tokens without the padding."""
        return int(self.attention_mask.sum())

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward."""
        named = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "token_type_ids": self.token_type_ids,
        }
        return {name: value for name, value in named.items() if value is not None}


def collate(rows: Sequence[TokenizedExample], pad_id: int, device: torch.device, token_type_ids: bool) -> Batch:
    """Pad rows on the right with `pad_id` and move them to `device`; leave out token type ids unless asked for."""
    length = max(len(row.input_ids) for row in rows)

    def padded(values: list[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*v, *[fill] * (length - len(v))] for v in values], device=device)

    return Batch(
        input_ids=padded([row.input_ids for row in rows], pad_id),
        attention_mask=padded([[1] * len(row.input_ids) for row in rows], 0),
        token_type_ids=padded([row.token_type_ids for row in rows], 0) if token_type_ids else None,
        positions=torch.tensor([row.position for row in rows], device=device),
        labels=torch.tensor([row.label for row in rows], device=device),
    )
