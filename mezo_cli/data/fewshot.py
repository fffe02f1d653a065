"""Sample row numbers: the published code's few-shot splits, and a held-out dev set.

All functions take row counts or label indices only. The published code draws from numpy's legacy global generator;
`RandomState(seed)` gives the same numbers and leaves the global generator alone.
"""

from collections.abc import Sequence

import numpy as np

TEST_ROWS = 1000  # the published code evaluates on at most this many test rows
TEST_SEED = 42  # and draws them with this seed, whatever the data seed


def few_shot(labels: Sequence[int], shots: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the row numbers of train (`shots` rows per class) and of dev (the next `shots`): LM-BFF's k-shot protocol.

    All rows are shuffled once. Then the classes follow each other, in the order of their first row after the shuffle.
    A class with too few rows gives what it has.
    """
    order = list(range(len(labels)))
    np.random.RandomState(seed).shuffle(order)
    groups: dict[int, list[int]] = {}
    for row in order:
        groups.setdefault(labels[row], []).append(row)
    train = [row for group in groups.values() for row in group[:shots]]
    dev = [row for group in groups.values() for row in group[shots : 2 * shots]]
    return train, dev


def published_test(count: int) -> list[int]:
    """Return the row numbers of the published code's test set out of `count` rows.

    They are all rows, or the first 1,000 after a shuffle with seed 42. For .tsv the published code shuffles the lines,
    for .csv it calls pandas' `sample(n=1000, random_state=42)`; both give the same rows.
    """
    if count <= TEST_ROWS:
        return list(range(count))
    return np.random.RandomState(TEST_SEED).permutation(count)[:TEST_ROWS].tolist()


def demonstrations(count: int, pool: int, own: Sequence[int | None], seed: int) -> list[list[int]]:
    """Return the numbers of `count` rows out of `pool` for each row to evaluate, as the published code draws them.

    The seed gives each row a seed of its own, by the row's place; the set is the head of a permutation by that.

    Args:
        count: rows in a set; less than `pool`.
        pool: rows to draw from.
        own: the number in the pool of each row to evaluate, which is not drawn for it; None for a row of another split.
        seed: of the data.
    """
    seeds = np.random.RandomState(seed).randint(0, 10_000, len(own))
    heads = (np.random.RandomState(row_seed).permutation(pool)[: count + 1].tolist() for row_seed in seeds)
    return [[row for row in head if row != number][:count] for head, number in zip(heads, own, strict=True)]


def hold_out(labels: Sequence[int], size: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the row numbers that stay, and of a stratified set of `size` others.

    Each class gives its quota, largest remainders first, and keeps at least one row if possible. Both parts are in
    file order. There must be more than `size` rows.
    """
    members: dict[int, list[int]] = {}
    for row, label in enumerate(labels):
        members.setdefault(label, []).append(row)
    can_keep = sum(len(rows) - 1 for rows in members.values()) >= size
    most = {label: len(rows) - can_keep for label, rows in members.items()}
    quota = {label: len(rows) * size / len(labels) for label, rows in members.items()}
    take = {label: min(int(quota[label]), most[label]) for label in members}
    while sum(take.values()) < size:
        open_labels = [label for label in sorted(members) if take[label] < most[label]]
        take[max(open_labels, key=lambda label: quota[label] - take[label])] += 1
    generator = np.random.RandomState(seed)
    held_out: set[int] = set()
    for label in sorted(members):
        held_out.update(members[label][i] for i in generator.permutation(len(members[label]))[: take[label]])
    return [row for row in range(len(labels)) if row not in held_out], sorted(held_out)


def sample(count: int, train: int, dev: int, seed: int) -> tuple[list[int], list[int]]:
    """Return `train` row numbers and `dev` others out of `count`, whatever their class (the paper's OPT runs).

    One permutation gives both: first the train rows, then the dev rows. `count` must be at least train + dev.
    """
    order = np.random.RandomState(seed).permutation(count)[: train + dev].tolist()
    return order[:train], order[train:]
