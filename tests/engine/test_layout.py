"""The blocks of the checkpoint's tensors in an engine's fused and sharded ones."""

import numpy as np
import pytest

from mezo_cli.engine.layout import Block, LayoutError, as_matrix, check_whole, find_blocks

SHAPES = {"q": (4, 6), "k": (2, 6), "out": (6, 4), "bias": (4,)}


def coordinates(name: str) -> np.ndarray:
    """Each element's tensor, row and column, counted from 1: int [3, rows, columns]."""
    rows, columns = as_matrix(SHAPES[name])
    row, column = np.mgrid[1 : rows + 1, 1 : columns + 1]
    return np.stack([np.full((rows, columns), list(SHAPES).index(name) + 1), row, column])


def test_a_fused_tensor_is_cut_into_the_rows_of_its_tensors() -> None:
    fused = np.concatenate([coordinates("q")[:, 2:], coordinates("k")[:, 1:]], axis=1)  # the second of two shards
    assert find_blocks(*fused) == [Block(0, 2, 0, 2, 6, 0, 0), Block(1, 1, 0, 1, 6, 2, 0)]


def test_a_shard_of_columns_is_one_block() -> None:
    assert find_blocks(*coordinates("out")[:, :, 2:]) == [Block(2, 0, 2, 6, 2, 0, 0)]


def test_padding_belongs_to_no_tensor() -> None:
    padded = np.zeros((3, 8, 6), dtype=int)
    padded[:, :4] = coordinates("q")
    assert find_blocks(*padded) == [Block(0, 0, 0, 4, 6, 0, 0)]
    assert find_blocks(*np.zeros((3, 4, 4), dtype=int)) == []


def test_vectors_side_by_side_are_blocks_of_one_row() -> None:
    both = np.concatenate([coordinates("bias")[:, :, 2:], coordinates("bias")[:, :, :1]], axis=2)
    assert find_blocks(*both) == [Block(3, 0, 2, 1, 2, 0, 0), Block(3, 0, 0, 1, 1, 0, 2)]


def test_neighbouring_rows_of_different_places_are_not_joined() -> None:
    swapped = coordinates("q")[:, [2, 3, 0, 1]]
    assert find_blocks(*swapped) == [Block(0, 2, 0, 2, 6, 0, 0), Block(0, 0, 0, 2, 6, 2, 0)]


def test_a_transposed_tensor_is_refused() -> None:
    row, column = np.mgrid[1:65, 1:65]
    with pytest.raises(LayoutError, match="not made of blocks"):
        find_blocks(np.ones((64, 64), dtype=int), column, row)


def test_every_element_must_be_held_by_some_shard() -> None:
    shapes = list(SHAPES.items())
    halves = [Block(2, 0, 0, 6, 2, 0, 0), Block(2, 0, 2, 6, 2, 0, 0)]
    others = [Block(0, 0, 0, 4, 6, 0, 0), Block(1, 0, 0, 2, 6, 4, 0), Block(3, 0, 0, 1, 4, 0, 0)]
    copied = others[2]._replace(local_column=4)  # the same elements in another shard count once
    check_whole(shapes, [*halves, *others, copied])
    with pytest.raises(LayoutError, match=r"holds 12 of the 24 elements of out"):
        check_whole(shapes, [halves[0], *others])
