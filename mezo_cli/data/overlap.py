"""Count the rows that two splits share: scores on them are too good."""

from collections.abc import Mapping, Sequence

from mezo_cli.config.schema import Example


def row_key(example: Example) -> tuple[str, ...]:
    """Return what two rows with the same texts have in common: case and white space do not count."""
    return tuple(" ".join(text.split()).casefold() for text in example.texts)


def shared_rows(named: Mapping[str, Sequence[Example]]) -> dict[tuple[str, str], int]:
    """Return (first split, other split) -> the rows of the other that are also in the first, of those there are."""
    keys = {split: {row_key(example) for example in examples} for split, examples in named.items()}
    pairs = (("train", "dev"), ("train", "test"), ("dev", "test"))
    return {
        (first, other): sum(row_key(example) in keys[first] for example in named[other])
        for first, other in pairs
        if other in named
    }
