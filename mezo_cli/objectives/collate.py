"""Collate tokenized rows into one batch: lay them out on the host, and copy all of it to the device at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of each array in a copy

Arrays = dict[str, np.ndarray]  # int64 or bool
Rows = Sequence[Any]  # with `input_ids`, `position` and `label`, as `TokenizedExample` has them
LayOut = Callable[[Rows], Arrays | None]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows for one forward.

    Attributes:
        rows: the rows, on the host.
        layout: what `collate`'s lay_out made of the rows.
        positions: the token of each row whose hidden state is scored, int64 [rows].
        labels: int64 [rows].
        is_padded: whether `layout` is the padded batch.
    """

    rows: Rows
    pad_id: int
    has_token_type_ids: bool
    device: torch.device
    layout: dict[str, Tensor]
    positions: Tensor
    labels: Tensor
    is_padded: bool

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward: the rows, padded on the right to the longest of them.

        Returns:
            input_ids, attention_mask and, where the model takes them, token_type_ids: int64 [rows, length].
        """
        if self.is_padded:
            return self.layout
        return to_device(pad(self.rows, self.pad_id, self.has_token_type_ids), self.device)


def collate(
    rows: Rows, pad_id: int, device: torch.device, token_type_ids: bool, lay_out: LayOut | None = None
) -> Batch:
    """Lay rows out, padded if `lay_out` is None or returns None, and copy them to `device` at once; nothing waits."""
    arrays = None if lay_out is None else lay_out(rows)
    is_padded = arrays is None
    arrays = pad(rows, pad_id, token_type_ids) if arrays is None else arrays
    own = {"positions": np.array([row.position for row in rows]), "labels": np.array([row.label for row in rows])}
    layout = to_device({**arrays, **{f"batch_{name}": value for name, value in own.items()}}, device)
    positions, labels = layout.pop("batch_positions"), layout.pop("batch_labels")
    return Batch(rows, pad_id, token_type_ids, device, layout, positions, labels, is_padded)


def pad(rows: Rows, pad_id: int, token_type_ids: bool) -> Arrays:
    """Pad rows on the right to the longest of them: the arrays of `Batch.inputs`."""
    lengths = np.array([len(row.input_ids) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    ids, types = np.full(is_token.shape, pad_id), np.zeros(is_token.shape, dtype=np.int64)
    ids[is_token] = np.concatenate([row.input_ids for row in rows])
    arrays = {"input_ids": ids, "attention_mask": is_token.astype(np.int64)}
    if token_type_ids:
        types[is_token] = np.concatenate([row.token_type_ids for row in rows])
        arrays["token_type_ids"] = types
    return arrays


def batches_by_length(rows: Rows, size: int) -> list[list[int]]:
    """Return the numbers of the rows of each batch of `size` rows, formed by length, to pad little."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
    return [order[start : start + size] for start in range(0, len(rows), size)]


def to_device(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays as tensors on `device`, int64 or bool. There they are parts of one tensor: one copy moves all.

    Under CUDA the copy is from pinned memory, and the host does not wait for it.
    """
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(value if value.dtype == bool else value.astype(np.int64)))
        for name, value in arrays.items()
    }
    if device.type == "cpu":
        return tensors
    starts, total = {}, 0
    for name, tensor in tensors.items():
        starts[name] = total
        total += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def part(whole: Tensor, name: str, like: Tensor) -> Tensor:
        return whole[starts[name] : starts[name] + like.nbytes].view(like.dtype).view(like.shape)

    whole = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, tensor in tensors.items():
        part(whole, name, tensor).copy_(tensor)
    moved = whole.to(device, non_blocking=True)
    return {name: part(moved, name, tensor) for name, tensor in tensors.items()}
