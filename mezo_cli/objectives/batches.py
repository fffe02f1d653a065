"""Rows side by side, as a model takes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezo_cli.schema import Encoded

# Tokens that one forward may carry for both sides of a step: beyond it drawing z is a small part of a step, and
# activations a large part of memory.
CARRIED = 1024


@dataclass(frozen=True)
class Batch:
    """Rows padded to their own longest. ids, attention, segments: [rows, length]; mask, labels: [rows]."""

    ids: Tensor
    attention: Tensor
    segments: Tensor | None
    mask: Tensor
    labels: Tensor

    @classmethod
    def of(cls, rows: Sequence[Encoded], pad_id: int, device: torch.device, segments: bool) -> "Batch":
        """Pad `rows` on the right with `pad_id`."""
        length = max(len(row.ids) for row in rows)

        def padded(values: list[list[int]], fill: int) -> Tensor:
            return torch.tensor([v + [fill] * (length - len(v)) for v in values], device=device)

        return cls(
            ids=padded([r.ids for r in rows], pad_id),
            attention=padded([[1] * len(r.ids) for r in rows], 0),
            segments=padded([r.segments for r in rows], 0) if segments else None,
            mask=torch.tensor([r.mask for r in rows], device=device),
            labels=torch.tensor([r.label for r in rows], device=device),
        )

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return int(self.attention.sum())

    def inputs(self) -> dict[str, Tensor]:
        """Return the model's keyword arguments."""
        named = {"input_ids": self.ids, "attention_mask": self.attention, "token_type_ids": self.segments}
        return {name: value for name, value in named.items() if value is not None}
