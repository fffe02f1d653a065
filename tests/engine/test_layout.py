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


PADDED = np.concatenate([coordinates("q"), np.zeros((3, 4, 6), dtype=int)], axis=1)
FUSED = np.concatenate([coordinates("q")[:, 2:], coordinates("k")[:, 1:]], axis=1)  # the second of two shards
BIASES = np.concatenate([coordinates("bias")[:, :, 2:], coordinates("bias")[:, :, :1]], axis=2)


@pytest.mark.parametrize(
    ("local", "blocks"),
    [
        pytest.param(FUSED, [Block(0, 2, 0, 2, 6, 0, 0), Block(1, 1, 0, 1, 6, 2, 0)], id="rows of two tensors"),
        pytest.param(coordinates("out")[:, :, 2:], [Block(2, 0, 2, 6, 2, 0, 0)], id="columns"),
        pytest.param(PADDED, [Block(0, 0, 0, 4, 6, 0, 0)], id="padding, of no tensor"),
        pytest.param(BIASES, [Block(3, 0, 2, 1, 2, 0, 0), Block(3, 0, 0, 1, 1, 0, 2)], id="vectors"),
        pytest.param(
            coordinates("q")[:, [2, 3, 0, 1]], [Block(0, 2, 0, 2, 6, 0, 0), Block(0, 0, 0, 2, 6, 2, 0)], id="swapped"
        ),
    ],
)
def test_the_blocks_of_a_local_tensor(local: np.ndarray, blocks: list[Block]) -> None:
    assert find_blocks(*local) == blocks


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
