"""Select the rows of train, dev and test from a data source; `load` returns them, `export` writes them.

`shared_rows` counts the rows that two of them share: scores on these are too good.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mezo_cli.config.schema import Config, DataConfig, Example, Splits, TaskConfig
from mezo_cli.console import log
from mezo_cli.data import sampling
from mezo_cli.data.sources import open_other_tests, open_source
from mezo_cli.data.table import Source, TaskRows
from mezo_cli.errors import UserError, join
from mezo_cli.runs.atomic import write_folder

DEV_ROWS = 1000  # without `data.dev_size`; then, without `data.train_size`, also at most a tenth


def select_rows(task: TaskConfig, data: DataConfig, seed: int) -> Source:
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
    source = open_source(task, data)
    has_test = source.test is not None or source.dev is not None
    if data.test_size is not None and not has_test:
        source = _hold_out_test(source, data, seed)
    whole, official = source.train, source.test or source.dev
    notes = [*source.notes, *(n for rows in (whole, source.dev, source.test) if rows for n in rows.notes)]
    if data.shots is not None:
        absent = [label for i, label in enumerate(task.labels) if i not in set(whole.labels)]
        if absent:
            raise UserError(f"data.shots={data.shots}: {whole.table.path} has no row of class {join(absent)}")
        train, dev = (whole.take(rows) for rows in sampling.few_shot(whole.labels, data.shots, seed))
        test = official.take(sampling.published_test(len(official.labels))) if official else None
        notes += _rare_classes(task, "dev", dev, data.shots)
    elif source.dev is not None and source.test is not None:
        train, dev, test = whole, source.dev, source.test
        if data.train_size is not None:
            train, _ = _sample(whole, data.train_size, 0, seed)
    else:
        train, dev = _train_and_dev(whole, data, seed)
        if len(train.labels) < (data.train_size or 0):
            why = f"{whole.table.name} has {len(whole.labels)}"
            notes.append(f"train: {len(train.labels)} rows, not data.train_size={data.train_size}: {why}")
        test = official
        origin = official.table.name if official else "none"
        origin = origin if has_test or not official else f"{data.test_size} other rows of it"
        fewer = f", not data.dev_size={data.dev_size}" if len(dev.labels) < (data.dev_size or 0) else ""
        notes.append(f"dev: {len(dev.labels)} rows held out of {whole.table.name}{fewer}; test: {origin}")
    notes += _rare_classes(task, "train", train, data.shots)  # without shots, those with no rows
    if test is not None and data.test_size is not None and has_test:  # permuted also where all are taken, as released
        count = len(test.labels)
        test = test.take(sampling.sample(count, min(data.test_size, count), 0, seed)[0])
    draws_all = data.shots is None and data.train_size is None  # for demonstrations: rows held out as dev included
    if data.eval_limit is not None:
        dev = dev.take(sampling.limit([*range(len(dev.labels))], data.eval_limit))
        test = test and test.take(sampling.limit([*range(len(test.labels))], data.eval_limit))
    return Source(train, dev, test, notes, source.revision, whole if draws_all else train)


def load(task: TaskConfig, data: DataConfig, seed: int) -> Splits:
    """Return the rows of a run as `Example`s.

    They have texts in the order of `task.columns` and the label's index; those of a task without labels (a config's
    `data_task`) have all columns. With `task.demonstrations`, rows of dev and test have theirs. `seed` is the config's
    `data_seed`. Warnings are in `Splits.notes`.
    """
    rows = select_rows(task, data, seed)
    assert rows.dev is not None
    for name, part in (("train", rows.train), ("dev", rows.dev)):
        if not part.labels:
            why = f" (data.shots={data.shots}; {'; '.join(rows.notes)})" if data.shots else ""
            raise UserError(f"{part.table.path}: no rows are left for {name}, which training needs{why}")
    train, dev = rows.train.examples(), rows.dev.examples()
    test = None if rows.test is None else rows.test.examples()
    digest = hashlib.sha256()  # over the texts and labels, or all columns; none contains NUL: it is unambiguous
    for examples in (train, dev, test):
        for row in examples or ():
            parts = row.texts if row.columns is None else [json.dumps(row.columns, sort_keys=True)]
            digest.update("\0".join([*parts, str(row.label), ""]).encode())
        digest.update(b"none\0\0" if examples is None else b"\0")
    if task.demonstrations and rows.pool is not None:
        dev = _with_demonstrations(dev, rows.pool, task.demonstrations, seed)
        test = None if test is None else _with_demonstrations(test, rows.pool, task.demonstrations, seed)
    return Splits(train, dev, test, digest.hexdigest(), rows.notes, rows.revision)


def _with_demonstrations(rows: list[Example], pool: TaskRows, count: int, seed: int) -> list[Example]:
    examples = pool.examples()
    if len(examples) <= count:
        why = f"needs more than {count} rows of train to draw from, and there are {len(examples)}"
        raise UserError(f"{pool.table.path}: task.demonstrations={count} {why}")
    places = {example.where: place for place, example in enumerate(examples)}  # a row is no demonstration of its own
    sets = sampling.demonstrations(count, len(examples), [places.get(row.where) for row in rows], seed)
    return [
        replace(row, demonstrations=tuple(examples[i] for i in drawn)) for row, drawn in zip(rows, sets, strict=True)
    ]


def load_splits(config: Config, tells: bool = True) -> Splits:
    """Load the splits of a run, and log their notes if it `tells` them."""
    splits = load(config.data_task, config.data, config.data_seed)
    for note in splits.notes if tells else ():
        log.info("note   %s", note)
    return splits


def _hold_out_test(source: Source, data: DataConfig, seed: int) -> Source:
    """Make a test set of a source that has train alone: stratified, or with `data.train_size` uniform, as dev is."""
    rows, size, count = source.train, data.test_size or 0, len(source.train.labels)
    if count < size + 2:
        why = f"too few for data.test_size={data.test_size}: train and dev need one each"
        raise UserError(f"{rows.table.path}: {count} rows, {why}")
    if data.train_size is None:
        rest, test = sampling.hold_out(rows.labels, size, seed)
    else:
        rest, test = (sorted(part) for part in sampling.sample(count, count - size, size, seed))
    return replace(source, train=rows.take(rest), test=replace(rows.take(test), notes=[]))


def _train_and_dev(rows: TaskRows, data: DataConfig, seed: int) -> tuple[TaskRows, TaskRows]:
    """Draw train and dev from the same rows; with `data.train_size` as many as asked for, or all rows if too few.

    Where rows are too few, dev has at most half of them, or with `data.as_released` all of its rows.
    """
    count, dev = len(rows.labels), data.dev_size or DEV_ROWS
    if data.train_size is not None:
        if count < data.train_size + dev and not data.as_released:
            dev = min(dev, max(count // 2, count - data.train_size))
        return _sample(rows, min(data.train_size, count - dev) if count > dev else data.train_size, dev, seed)
    if count < 2:
        raise UserError(f"{rows.table.path}: 1 row; at least 2 are needed to hold out a dev set")
    train, held_out = sampling.hold_out(rows.labels, max(1, min(dev, count // (2 if data.dev_size else 10))), seed)
    return rows.take(train), rows.take(held_out)


def _sample(rows: TaskRows, train: int, dev: int, seed: int) -> tuple[TaskRows, TaskRows]:
    count = len(rows.labels)
    if count < train + dev:
        more = f" and data.dev_size={dev}" if dev else ""
        raise UserError(f"{rows.table.path}: {count} rows, too few for data.train_size={train}{more}")
    drawn = sampling.sample(count, train, dev, seed)
    return rows.take(drawn[0]), rows.take(drawn[1])


def _rare_classes(task: TaskConfig, name: str, rows: TaskRows, shots: int | None) -> list[str]:
    counts = Counter(rows.labels)
    short = [f"'{label}' {counts[i]}" for i, label in enumerate(task.labels) if counts[i] < (shots or 1)]
    few = "no" if shots is None else f"fewer than {shots}"
    return [f"{name}: {few} rows for class {join(short)}"] if short else []


# --- files ---


def export(
    task: TaskConfig, data: DataConfig, seed: int, out: Path, warn: Callable[[str], None] = log.warning
) -> list[Path]:
    """Write the train, dev and test rows into the folder `out`, new or empty, and return the files.

    Few-shot splits are the published code's files byte for byte. The rows are those that `load` returns. Classes with
    too few rows are no error here: they are written, and `warn` is called with each note. A .tsv source keeps its lines
    and header, .csv is written with minimal quoting, everything else as JSONL. MNLI's files are dev_matched,
    test_matched, test_mismatched. No file is left half-written.
    """
    selected = select_rows(task, data, seed)
    for note in selected.notes:
        warn(note)
    test_stem = task.files.dev.replace("dev", "test", 1)
    parts = {"train": selected.train, task.files.dev: selected.dev, test_stem: selected.test}
    if selected.test is not None and "_" in test_stem:
        for name, rows in open_other_tests(task, selected.test).items():
            count = len(rows.labels)
            kept = list(range(count)) if data.shots is None else sampling.published_test(count)
            parts[f"{test_stem.partition('_')[0]}_{name}"] = rows.take(sampling.limit(kept, data.eval_limit))
    tables = {stem: rows.table for stem, rows in parts.items() if rows is not None}
    contents = {stem + table.suffix: table.export().encode() for stem, table in tables.items()}

    def write(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name).write_bytes(content)

    write_folder(out, write, "--export")
    return [out / name for name in contents]


# --- what is in the splits ---


def row_key(example: Example) -> tuple[str, ...]:
    """Return what two rows with the same texts have in common: case and white space do not count."""
    return tuple(" ".join(text.split()).casefold() for text in example.texts)


def shared_rows(named: Mapping[str, Sequence[Example]]) -> dict[tuple[str, str], int]:
    """Return (first split, other split) -> the rows of the other that are also in the first, of those there are."""
    keys = {split: {row_key(example) for example in examples} for split, examples in named.items()}
    pairs = [pair for pair in (("train", "dev"), ("train", "test"), ("dev", "test")) if pair[1] in named]
    return {(first, other): sum(row_key(row) in keys[first] for row in named[other]) for first, other in pairs}
