"""Select the rows of train, dev and test from a data source; `load` returns them, `export` writes them."""

import hashlib
import json
import logging
from collections import Counter
from dataclasses import dataclass, field, replace

from mezo_cli.config.schema import Config, DataConfig, Example, FilesConfig, Splits, TaskConfig
from mezo_cli.data import demo, fewshot, folder, hub
from mezo_cli.data.table import Source, TaskRows
from mezo_cli.errors import UserError, join

log = logging.getLogger("mezo")


@dataclass(frozen=True)
class Subset:
    """Some rows of a table, in the order in which they are used."""

    rows: TaskRows
    indices: list[int]

    def examples(self) -> list[Example]:
        """Return the examples of the subset."""
        return [self.rows.example(i) for i in self.indices]


@dataclass(frozen=True)
class Selection:
    """The rows of train, dev and test; `test` is None if there is none. `revision` is that of the source."""

    train: Subset
    dev: Subset
    test: Subset | None
    notes: list[str] = field(default_factory=list)
    revision: str | None = None


def select_rows(task: TaskConfig, data: DataConfig, seed: int) -> Selection:
    """Open the data source and select the rows of train, dev and test.

    - With `data.shots`: the published few-shot rules on train; test is the official dev set (.tsv) or the test set.
    - A source with labelled train, dev and test rows is used as it is (a prepared k-shot folder, the demo).
    - Otherwise dev is held out of train; test is the test set, else the official dev set, else there is none.

    With `data.test_size`, at most so many rows of the test set are drawn; if the source has train alone, they are held
    out of it before all else.
    With `data.train_size`, that many rows of train are drawn uniformly, and dev with them if it comes from train.
    `data.eval_limit` caps dev and test at the end.
    """
    if data.shots is not None and data.train_size is not None:
        raise UserError(
            f"data.shots={data.shots} and data.train_size={data.train_size}: give one of them; shots counts the rows "
            "of each class, train_size those of all"
        )
    if data.shots is not None and not task.labels:
        why = "its rows are read without labels, and shots counts the rows of each label"
        raise UserError(
            f"data.shots={data.shots}: task '{task.name}': {why}; give data.train_size={data.shots} or more"
        )
    if data.as_released and data.train_size is None and not task.generate.stop:
        raise UserError(
            "data.as_released=true is read with data.train_size alone, or by a task with task.generate.stop"
        )
    if isinstance(data, FilesConfig):
        source = folder.open_source(task, data)
    else:
        source = demo.open_source(task) if data.name == "demo" else hub.open_source(task)
    has_test = source.test is not None or source.dev is not None
    if data.test_size is not None and not has_test:
        source = _hold_out_test(source, data, seed)
    notes = [*source.notes, *(n for rows in (source.train, source.dev, source.test) if rows for n in rows.notes)]
    if data.shots is not None:
        absent = [label for i, label in enumerate(task.labels) if i not in set(source.train.labels)]
        if absent:
            raise UserError(f"data.shots={data.shots}: {source.train.table.path} has no row of class {join(absent)}")
        splits = fewshot.few_shot(source.train.labels, data.shots, seed)
        train, dev = (Subset(source.train, indices) for indices in splits)
        official = source.test if source.test is not None else source.dev
        test = Subset(official, fewshot.published_test(len(official))) if official is not None else None
        notes += _rare_classes(task, "dev", dev, data.shots)
    elif source.dev is not None and source.test is not None:
        train, dev, test = _all_rows(source.train), _all_rows(source.dev), _all_rows(source.test)
        if data.train_size is not None:
            train, _ = _sample(source.train, data.train_size, 0, seed)
    else:
        if data.train_size is None:
            train, dev = _held_out(source.train, data.dev_size, seed)
        else:
            train, dev = _sample(source.train, *_sizes(len(source.train), data), seed)
        if len(train.indices) < (data.train_size or 0):
            why = f"{source.train.table.name} has {len(source.train)}"
            notes.append(f"train: {len(train.indices)} rows, not data.train_size={data.train_size}: {why}")
        official = source.test if source.test is not None else source.dev
        test = _all_rows(official) if official is not None else None
        origin = official.table.name if official is not None else "none"
        origin = origin if has_test or official is None else f"{data.test_size} other rows of it"
        notes.append(f"dev: {len(dev.indices)} rows held out of {source.train.table.name}; test: {origin}")
    notes += _rare_classes(task, "train", train, data.shots)
    dev = Subset(dev.rows, fewshot.limit(dev.indices, data.eval_limit))
    if test is not None and data.test_size is not None and has_test:  # permuted also where all are taken, as released
        drawn, _ = fewshot.sample(len(test.indices), min(data.test_size, len(test.indices)), 0, seed)
        test = Subset(test.rows, [test.indices[i] for i in drawn])
    test = Subset(test.rows, fewshot.limit(test.indices, data.eval_limit)) if test is not None else None
    return Selection(train, dev, test, notes, source.revision)


def load(task: TaskConfig, data: DataConfig, seed: int) -> Splits:
    """Return the rows of a run as `Example`s.

    They have texts in the order of `task.columns` and the label's index; those of a task without labels (a config's
    `data_task`) have all columns. With `task.demonstrations`, rows of dev and test have theirs. `seed` is the config's
    `data_seed`. Warnings are in `Splits.notes`.
    """
    selected = select_rows(task, data, seed)
    for name, subset in (("train", selected.train), ("dev", selected.dev)):
        if not subset.indices:
            why = f" (data.shots={data.shots}; {'; '.join(selected.notes)})" if data.shots else ""
            raise UserError(f"{subset.rows.table.path}: no rows are left for {name}, which training needs{why}")
    train, dev = selected.train.examples(), selected.dev.examples()
    test = selected.test.examples() if selected.test is not None else None
    fingerprint = _fingerprint(train, dev, test)
    if task.demonstrations:
        source = selected.train
        draws_all = data.shots is None and data.train_size is None  # rows held out as dev included
        pool = list(range(len(source.rows))) if draws_all else source.indices
        dev = _with_demonstrations(dev, selected.dev, Subset(source.rows, pool), task.demonstrations, seed)
        if test is not None and selected.test is not None:
            test = _with_demonstrations(test, selected.test, Subset(source.rows, pool), task.demonstrations, seed)
    return Splits(train, dev, test, fingerprint, selected.notes, selected.revision)


def _with_demonstrations(rows: list[Example], subset: Subset, pool: Subset, count: int, seed: int) -> list[Example]:
    """Return rows with their demonstrations; a row of the pool is none of its own."""
    if len(pool.indices) <= count:
        why = f"needs more than {count} rows of train to draw from, and there are {len(pool.indices)}"
        raise UserError(f"{pool.rows.table.path}: task.demonstrations={count} {why}")
    places = {row: place for place, row in enumerate(pool.indices)} if subset.rows is pool.rows else {}
    sets = fewshot.demonstrations(count, len(pool.indices), [places.get(row) for row in subset.indices], seed)
    examples = pool.examples()
    return [
        replace(row, demonstrations=tuple(examples[i] for i in drawn)) for row, drawn in zip(rows, sets, strict=True)
    ]


def load_splits(config: Config) -> Splits:
    """Load the splits of a run, and log their notes."""
    splits = load(config.data_task, config.data, config.data_seed)
    for note in splits.notes:
        log.info("note   %s", note)
    return splits


def _hold_out_test(source: Source, data: DataConfig, seed: int) -> Source:
    """Make a test set of a source that has train alone: stratified, or with `data.train_size` uniform, as dev is."""
    rows, size, setting = source.train, data.test_size or 0, f"data.test_size={data.test_size}"
    if len(rows) < size + 2:
        raise UserError(f"{rows.table.path}: {len(rows)} rows, too few for {setting}: train and dev need one each")
    if data.train_size is None:
        rest, test = fewshot.hold_out(rows.labels, size, seed)
    else:
        rest, test = (sorted(part) for part in fewshot.sample(len(rows), len(rows) - size, size, seed))
    return replace(source, train=rows.take(rest), test=replace(rows.take(test), notes=[]))


def _all_rows(rows: TaskRows) -> Subset:
    return Subset(rows, list(range(len(rows))))


def _held_out(rows: TaskRows, size: int, seed: int) -> tuple[Subset, Subset]:
    if len(rows) < 2:
        raise UserError(f"{rows.table.path}: 1 row; at least 2 are needed to hold out a dev set")
    train, dev = fewshot.hold_out(rows.labels, max(1, min(size, len(rows) // 10)), seed)
    return Subset(rows, train), Subset(rows, dev)


def _sizes(count: int, data: DataConfig) -> tuple[int, int]:
    """Return the sizes of train and dev that are drawn from `count` rows: those asked for, or all rows if too few.

    Then dev has at most half of them, or with `data.as_released` all of its rows.
    """
    train, dev = data.train_size or count, data.dev_size
    if count < train + dev and not data.as_released:
        dev = min(dev, max(count // 2, count - train))
    return (min(train, count - dev) if count > dev else train), dev


def _sample(rows: TaskRows, train: int, dev: int, seed: int) -> tuple[Subset, Subset]:
    if len(rows) < train + dev:
        more = f" and data.dev_size={dev}" if dev else ""
        raise UserError(f"{rows.table.path}: {len(rows)} rows, too few for data.train_size={train}{more}")
    splits = fewshot.sample(len(rows), train, dev, seed)
    return Subset(rows, splits[0]), Subset(rows, splits[1])


def _rare_classes(task: TaskConfig, name: str, subset: Subset, shots: int | None) -> list[str]:
    """Return a note that names the classes with fewer than `shots` rows; without shots, those with none."""
    counts = Counter(subset.rows.labels[i] for i in subset.indices)
    short = [f"'{label}' {counts[i]}" for i, label in enumerate(task.labels) if counts[i] < (shots or 1)]
    few = "no" if shots is None else f"fewer than {shots}"
    return [f"{name}: {few} rows for class {join(short)}"] if short else []


def _fingerprint(*splits: list[Example] | None) -> str:
    """Return the sha256 over the texts and labels, or all columns, of all splits.

    No text contains NUL, and JSON none either: the encoding is unambiguous.
    """
    digest = hashlib.sha256()
    for examples in splits:
        for row in examples or ():
            parts = row.texts if row.columns is None else [json.dumps(row.columns, sort_keys=True)]
            digest.update("\0".join([*parts, str(row.label), ""]).encode())
        digest.update(b"none\0\0" if examples is None else b"\0")
    return digest.hexdigest()
