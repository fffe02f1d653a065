"""From a source to the rows of train, dev and test: one plan, which `load` reads and `export` writes."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from mezo_cli.data import demo, fewshot, folder, hub
from mezo_cli.data.source import Source
from mezo_cli.data.table import Rows
from mezo_cli.errors import UserError, listed
from mezo_cli.schema import DataConfig, Example, Splits, TaskConfig


@dataclass(frozen=True)
class Part:
    """Some rows of a table, in the order in which they are used."""

    rows: Rows
    chosen: list[int]

    def examples(self) -> list[Example]:
        """Build the examples of this part only."""
        return [self.rows.example(i) for i in self.chosen]


@dataclass(frozen=True)
class Plan:
    """Which rows are train, dev and test; `official` is the table that test was taken from."""

    train: Part
    dev: Part
    test: Part | None
    notes: list[str] = field(default_factory=list)


def plan(task: TaskConfig, data: DataConfig, seed: int) -> Plan:
    """Open the source and choose the rows.

    - `data.shots` given: the reference's few-shot rules on train; test is the official dev set (.tsv) or the test set.
    - a source with labelled train, dev and test: used as it is (a prepared k-shot folder, the demo).
    - otherwise: dev is held out of train, test is the test set or else the official dev set, or there is none.

    `data.train_size` rows of train are drawn uniformly, with dev beside them where it comes out of train;
    `data.eval_limit` then caps dev and test. Raises `UserError` for whatever is wrong with the data.
    """
    if data.shots is not None and data.train_size is not None:
        raise UserError(
            f"data.shots={data.shots} and data.train_size={data.train_size}: give one of them; shots counts the rows "
            "of each class, train_size those of all"
        )
    source = _open(task, data)
    notes = [*source.notes, *(n for rows in (source.train, source.dev, source.test) if rows for n in rows.notes)]
    if data.shots is not None:
        chosen = fewshot.few_shot(source.train.labels, data.shots, seed)
        train, dev = (Part(source.train, rows) for rows in chosen)
        official = source.test if source.test is not None else source.dev
        test = Part(official, fewshot.reference_test(len(official))) if official is not None else None
        notes += [*_short(task, "train", train, data.shots), *_short(task, "dev", dev, data.shots)]
    elif source.dev is not None and source.test is not None:
        train, dev, test = _whole(source.train), _whole(source.dev), _whole(source.test)
        if data.train_size is not None:
            train, _ = _drawn(source.train, data.train_size, 0, seed)
    else:
        if data.train_size is None:
            train, dev = _held_out(source.train, data.dev_size, seed)
        else:
            train, dev = _drawn(source.train, data.train_size, data.dev_size, seed)
        official = source.test if source.test is not None else source.dev
        test = _whole(official) if official is not None else None
        origin = official.table.name if official is not None else "none"
        notes.append(f"dev: {len(dev.chosen)} rows held out of {source.train.table.name}; test: {origin}")
    if data.shots is None:
        notes += _missing(task, train)
    dev = Part(dev.rows, fewshot.limit(dev.chosen, data.eval_limit))
    test = Part(test.rows, fewshot.limit(test.chosen, data.eval_limit)) if test is not None else None
    return Plan(train, dev, test, notes)


def load(task: TaskConfig, data: DataConfig, seed: int) -> Splits:
    """Read the rows of a run as `Example`s: texts in the order of `task.columns`, the label's index.

    `seed` is `data.seed`, or the run's where that is null. Warnings are in `Splits.notes`.
    Raises `UserError` (file, line, what is allowed) for everything that is wrong with the data, and when dev or train
    would be empty.
    """
    planned = plan(task, data, seed)
    for name, part in (("train", planned.train), ("dev", planned.dev)):
        if not part.chosen:
            why = f" (data.shots={data.shots}; {'; '.join(planned.notes)})" if data.shots else ""
            raise UserError(f"{part.rows.table.path}: no rows are left for {name}, which training needs{why}")
    train, dev = planned.train.examples(), planned.dev.examples()
    test = planned.test.examples() if planned.test is not None else None
    return Splits(train, dev, test, _fingerprint(train, dev, test), planned.notes)


def _open(task: TaskConfig, data: DataConfig) -> Source:
    if data.name != "files" and data.dir is not None:
        raise UserError(f"data.dir={data.dir} is read by data=files only, not by data={data.name}")
    if data.name == "files":
        return folder.open_source(task, data)
    return demo.open_source(task) if data.name == "demo" else hub.open_source(task)


def _whole(rows: Rows) -> Part:
    return Part(rows, list(range(len(rows))))


def _held_out(rows: Rows, size: int, seed: int) -> tuple[Part, Part]:
    if len(rows) < 2:
        raise UserError(f"{rows.table.path}: 1 row; at least 2 are needed to hold a dev set out of it")
    train, dev = fewshot.hold_out(rows.labels, size, seed)
    return Part(rows, train), Part(rows, dev)


def _drawn(rows: Rows, train: int, dev: int, seed: int) -> tuple[Part, Part]:
    if len(rows) < train + dev:
        beside = f" and data.dev_size={dev}" if dev else ""
        raise UserError(f"{rows.table.path}: {len(rows)} rows, too few for data.train_size={train}{beside}")
    chosen = fewshot.draw(len(rows), train, dev, seed)
    return Part(rows, chosen[0]), Part(rows, chosen[1])


def _short(task: TaskConfig, name: str, part: Part, shots: int) -> list[str]:
    """Name the classes with fewer rows than were asked for."""
    labels = [part.rows.labels[i] for i in part.chosen]
    counts = [(label, labels.count(i)) for i, label in enumerate(task.labels)]
    short = [f"'{label}' {count}" for label, count in counts if count < shots]
    return [f"{name}: fewer than {shots} rows for class {listed(short)}"] if short else []


def _missing(task: TaskConfig, train: Part) -> list[str]:
    seen = {train.rows.labels[i] for i in train.chosen}
    missing = [f"'{label}'" for i, label in enumerate(task.labels) if i not in seen]
    return [f"train: no rows for class {listed(missing)}"] if missing else []


def _fingerprint(*splits: list[Example] | None) -> str:
    """Digest texts and labels of all splits with sha256; no text contains NUL, so that no two data sets collide."""
    digest = hashlib.sha256()
    for examples in splits:
        digest.update(_digestible(examples).encode())
    return digest.hexdigest()


def _digestible(examples: Iterable[Example] | None) -> str:
    if examples is None:
        return "none\0\0"
    return "".join("\0".join(e.texts) + f"\0{e.label}\0" for e in examples) + "\0"
