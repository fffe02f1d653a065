"""A reward for tests, in a module of its own: the worker imports it in a fraction of a second."""

from typing import Any


def digits(completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Return a number per completion that its characters make."""
    return [sum(ord(letter) * (i + 1) for i, letter in enumerate(text)) / 1000 for text in completions]
