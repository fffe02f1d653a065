"""Collate tokenized rows into one batch: lay them out on the host, and copy all of it to the device at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.models import LoadedModel

ALIGNMENT = 16  # bytes, of each array in a copy

Arrays = dict[str, np.ndarray]  # int64 or bool
Rows = Sequence[Any]  # with `input_ids`, `position` and `label`, as `TokenizedExample` has them


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows for one forward.

    Attributes:
        rows: the rows, on the host.
        layout: what `Objective.lay_out` made of the rows; of padded rows the keyword arguments of the model's forward.
        labels: int64 [rows].
        positions: the token of each row whose hidden state is scored, int64 [rows]; empty where that is no single one.
    """

    rows: Rows
    layout: dict[str, Tensor]
    labels: Tensor
    positions: Tensor = field(default_factory=lambda: torch.empty(0))


def collate(rows: Rows, loaded: LoadedModel, arrays: Arrays | None = None) -> Batch:
    """Copy what rows were laid out as to the model's device at once, and nothing waits for it.

    By default rows are padded on the right to the longest of them: input_ids, attention_mask and, where the model takes
    them, token_type_ids, int64 [rows, length].
    """
    if arrays is None:
        lengths = np.array([len(row.input_ids) for row in rows])
        is_token = np.arange(lengths.max()) < lengths[:, None]
        ids, types = np.zeros((2, *is_token.shape), dtype=np.int64)
        ids += loaded.tokenizer.pad_token_id or 0  # where it has none any id will do: no other token attends to padding
        ids[is_token] = np.concatenate([row.input_ids for row in rows])
        arrays = {"input_ids": ids, "attention_mask": is_token.astype(np.int64)}
        if "token_type_ids" in loaded.tokenizer.model_input_names:
            types[is_token] = np.concatenate([row.token_type_ids for row in rows])
            arrays["token_type_ids"] = types
    of_rows = {"labels of rows": [row.label for row in rows], "positions of rows": [row.position for row in rows]}
    layout = to_device(arrays | {name: np.array(values) for name, values in of_rows.items()}, loaded.device)
    return Batch(rows, layout, *(layout.pop(name) for name in of_rows))


def batches_by_length(rows: Rows, size: int) -> list[list[int]]:
    """Return the numbers of the rows of each batch of `size` rows, formed by length, to pad little."""
    order = np.argsort([len(row.input_ids) for row in rows], kind="stable").tolist()
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
    padded = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]

    def parts(whole: Tensor) -> list[Tensor]:
        of_arrays = zip(whole.split(padded), tensors.values(), strict=True)
        return [part[: like.nbytes].view(like.dtype).view(like.shape) for part, like in of_arrays]

    whole = torch.zeros(sum(padded), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(parts(whole), tensors.values(), strict=True):
        part.copy_(tensor)
    return dict(zip(tensors, parts(whole.to(device, non_blocking=True)), strict=True))
