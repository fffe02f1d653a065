"""Which rows go where: the reference's few-shot rules, a held-out dev set, and the cap on evaluation rows.

Functions of row numbers and label indices only. The reference draws from numpy's legacy global generator;
`RandomState(seed)` gives the same stream without touching it.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Row = TypeVar("Row")

TEST_ROWS = 1000  # the reference evaluates on at most so many test rows,
TEST_SEED = 42  # drawn with this seed whatever the data seed


def few_shot(labels: Sequence[int], shots: int, seed: int) -> tuple[list[int], list[int]]:
    """Draw `shots` rows per class for train and the next `shots` for dev (LM-BFF, `k-shot` protocol).

    One shuffle over all rows in file order; classes in the order in which they first appear after it, one after
    another; a class with too few rows is not topped up. Returns row numbers (train, dev).
    """
    order = list(range(len(labels)))
    np.random.RandomState(seed).shuffle(order)
    groups: dict[int, list[int]] = {}
    for row in order:
        groups.setdefault(labels[row], []).append(row)
    train = [row for group in groups.values() for row in group[:shots]]
    dev = [row for group in groups.values() for row in group[shots : 2 * shots]]
    return train, dev


def reference_test(count: int) -> list[int]:
    """Give the rows of the reference's test set out of `count`: all, or the first 1,000 after a shuffle with seed 42.

    For .tsv the reference shuffles the lines, for .csv it calls pandas' `sample(n=1000, random_state=42)`: a shuffle
    in place and a permutation, which are one and the same draw.
    """
    if count <= TEST_ROWS:
        return list(range(count))
    return np.random.RandomState(TEST_SEED).permutation(count)[:TEST_ROWS].tolist()


def hold_out(labels: Sequence[int], size: int, seed: int) -> tuple[list[int], list[int]]:
    """Split off a stratified dev set of min(size, a tenth of the rows) rows, at least 1.

    Every class gives its share (largest remainders first) and keeps one row where it can. Both parts stay in file
    order. Returns row numbers (train, dev). Needs at least 2 rows.
    """
    members: dict[int, list[int]] = {}
    for row, label in enumerate(labels):
        members.setdefault(label, []).append(row)
    size = max(1, min(size, len(labels) // 10))
    can_keep = sum(len(rows) - 1 for rows in members.values()) >= size
    most = {label: len(rows) - can_keep for label, rows in members.items()}
    share = {label: len(rows) * size / len(labels) for label, rows in members.items()}
    take = {label: min(int(share[label]), most[label]) for label in members}
    while sum(take.values()) < size:
        open_labels = [label for label in sorted(members) if take[label] < most[label]]
        take[max(open_labels, key=lambda label: share[label] - take[label])] += 1
    generator = np.random.RandomState(seed)
    dev: set[int] = set()
    for label in sorted(members):
        dev.update(members[label][i] for i in generator.permutation(len(members[label]))[: take[label]])
    return [row for row in range(len(labels)) if row not in dev], sorted(dev)


def draw(count: int, train: int, dev: int, seed: int) -> tuple[list[int], list[int]]:
    """Draw `train` rows, and `dev` others, out of `count`, whatever their class (the paper's OPT runs).

    One permutation gives both, the dev rows behind the train rows. Returns row numbers (train, dev). Needs
    `count >= train + dev`.
    """
    order = np.random.RandomState(seed).permutation(count)[: train + dev].tolist()
    return order[:train], order[train:]


def limit(rows: list[Row], cap: int | None) -> list[Row]:
    """Keep a uniform subset of `cap` rows, in their order.

    The draw has a fixed seed, so that runs with different seeds are held against the same rows, and a smaller cap
    gives a subset of a larger one's.
    """
    if cap is None or len(rows) <= cap:
        return rows
    kept = np.random.RandomState(TEST_SEED).permutation(len(rows))[:cap]
    return [rows[i] for i in sorted(kept.tolist())]
