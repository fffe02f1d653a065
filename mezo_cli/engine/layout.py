"""Find which elements of the checkpoint's tensors an engine's local tensor holds, as rectangular blocks.

Engines fuse tensors and cut them into shards. The layout is found by probing, and not known per model family:
tensors whose elements are their own tensor number, row and column are loaded like weights (`shards.py`).
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Block(NamedTuple):
    """A rectangle of a checkpoint tensor, and where it is in a local tensor. Tensors are matrices: see `as_matrix`."""

    tensor: int  # number of the checkpoint tensor
    row: int
    column: int
    rows: int
    columns: int
    local_row: int
    local_column: int

    @property
    def source(self) -> tuple[slice, slice]:
        """Where it is in the checkpoint tensor."""
        return slice(self.row, self.row + self.rows), slice(self.column, self.column + self.columns)

    @property
    def local(self) -> tuple[slice, slice]:
        """Where it is in the local tensor."""
        rows, columns = self.local_row + self.rows, self.local_column + self.columns
        return slice(self.local_row, rows), slice(self.local_column, columns)


class LayoutError(ValueError):
    """An engine's tensor is not made of blocks of the checkpoint's, or a tensor is not held whole."""


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a tensor as a matrix: one row for a vector, further dimensions joined to the columns."""
    return (1, int(np.prod(shape))) if len(shape) < 2 else (shape[0], int(np.prod(shape[1:])))


def digest(values: np.ndarray) -> str:
    """Return the SHA-256 of an array's values, row after row."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def find_blocks(tensor: np.ndarray, row: np.ndarray, column: np.ndarray) -> list[Block]:
    """Return the blocks of a local tensor.

    Args:
        tensor, row, column: for each local element the number of its tensor, its row and its column there, counted from
            1; 0 for an element that no checkpoint tensor gives. int [local rows, local columns].

    Raises:
        LayoutError: when neighbours in a local row are not neighbours in a row of a tensor, as in a transposed one.
    """
    begins = np.ones(tensor.shape, dtype=bool)
    begins[:, 1:] = (
        (tensor[:, 1:] != tensor[:, :-1])
        | (row[:, 1:] != row[:, :-1])
        | ((column[:, 1:] != column[:, :-1] + 1) & (tensor[:, 1:] > 0))
    )
    local_rows, local_columns = np.nonzero(begins)
    if len(local_rows) > 16 * max(len(tensor), 16):
        raise LayoutError("an engine's tensor is not made of blocks of the checkpoint's")
    ends, at = np.append(local_columns[1:], 0), (local_rows, local_columns)
    ends[np.append(local_rows[1:] != local_rows[:-1], True)] = tensor.shape[1]
    runs = np.column_stack([tensor[at], column[at], ends - local_columns, local_columns, local_rows, row[at]])
    runs = runs[runs[:, 0] > 0].astype(np.int64)
    runs = runs[np.lexsort((runs[:, 4], runs[:, 3]))]
    # Runs one below the other are one block: all but the row are equal, and both rows are the next ones.
    joins = np.zeros(len(runs), dtype=bool)
    joins[1:] = (runs[1:, :4] == runs[:-1, :4]).all(axis=1) & (runs[1:, 4:] == runs[:-1, 4:] + 1).all(axis=1)
    firsts = np.nonzero(~joins)[0]
    blocks = zip(runs[firsts].tolist(), np.diff(np.append(firsts, len(runs))).tolist(), strict=True)
    return [
        Block(number - 1, row - 1, column - 1, count, length, local_row, local_column)
        for (number, column, length, local_column, local_row, row), count in blocks
    ]


def check_whole(shapes: Sequence[tuple[str, Sequence[int]]], blocks: Iterable[Block]) -> None:
    """Check that blocks, of all shards together, hold every element of every tensor.

    A shard holds a block that another one holds too, or one apart from it.

    Raises:
        LayoutError: names the first tensor of which elements are missing.
    """
    counts = [0] * len(shapes)
    for tensor, _, _, rows, columns in {block[:5] for block in blocks}:
        counts[tensor] += rows * columns
    for (name, shape), count in zip(shapes, counts, strict=True):
        if count != int(np.prod(shape)):
            part = f"{count:,} of the {int(np.prod(shape)):,} elements of {name}"
            raise LayoutError(f"the engine holds {part} in an order that mezo can read")
