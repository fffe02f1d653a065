"""Divide things that have an order among ranks: neighbours stay together, and parts differ by one at most."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def split_bounds(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first and the last + 1 of `count` things that `rank` of `size` ranks takes."""
    return count * rank // size, count * (rank + 1) // size


def split_part(things: Sequence[T], rank: int, size: int) -> Sequence[T]:
    """Return the things that a rank takes, in their order."""
    first, last = split_bounds(len(things), rank, size)
    return things[first:last]


def split_sizes(count: int, size: int) -> list[int]:
    """Return how many of `count` things each rank takes."""
    bounds = [split_bounds(count, rank, size) for rank in range(size)]
    return [last - first for first, last in bounds]
