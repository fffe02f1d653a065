"""The rows of one file or hub split, and what a task makes of them: texts, and a label for each row."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mezo_cli.errors import UserError, did_you_mean, listed
from mezo_cli.schema import Example, TaskConfig


class _Absent:
    """The value of a key that a JSON object does not have; null is another matter."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


@dataclass(frozen=True)
class Table:
    """Rows as they were read, in file order; a row is cut into fields only when one of them is wanted.

    `split(row)` gives the row's fields in the order of `columns`, `line(row)` its line in an export, with its line
    end. `places` counts lines of the file (or rows, where a format has no lines) from 1.
    """

    name: str  # short, for Example.where: "train.tsv"
    path: str  # as the user gave it, for error lines
    suffix: str  # of the file an export writes: .tsv, .csv or .jsonl
    columns: list[str]
    rows: Sequence[Any]
    places: Sequence[int]
    split: Callable[[Any], Sequence[Any]]
    line: Callable[[Any], str]
    header: str = ""  # the line an export starts with
    by_line: bool = True
    numbers_mean: bool = False  # label numbers could follow another order than the task's: say how they are read
    guessed: bool = False  # the columns were not read but taken from task.files.columns
    extra_labels: tuple[tuple[str, ...], ...] = ()  # spellings of the labels that hold besides task.labels

    def where(self, i: int) -> str:
        """Name row `i` shortly: `train.tsv:17`, or `train.parquet row 17`."""
        return self.name + (f":{self.places[i]}" if self.by_line else f" row {self.places[i]}")

    def place(self, i: int) -> str:
        """Name row `i` in an error line, with the path as the user gave it."""
        return self.path + (f":{self.places[i]}" if self.by_line else f" row {self.places[i]}")

    def find(self, column: str, rename: dict[str, str]) -> int | None:
        """Give the position of the first source column that `rename` maps to `column`, or else of `column` itself.

        The renamed one wins: a hub data set may hold class numbers in `label` beside the names in `label_text`.
        Raises `UserError` when the name stands twice in the header.
        """
        sources = [source for source, target in rename.items() if target == column]
        for name in [*sources, column]:
            if self.columns.count(name) > 1:
                raise UserError(f"{self.path}: column '{name}' stands {self.columns.count(name)} times in the header")
            if name in self.columns:
                return self.columns.index(name)
        return None


@dataclass(frozen=True)
class Rows:
    """A table seen through a task: a label index for every row, and the positions of the texts."""

    table: Table
    text_at: list[int]
    labels: list[int]
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def example(self, i: int) -> Example:
        """Build row `i`. Texts are taken as they are, never stripped. Raises `UserError` for what is no text."""
        table = self.table
        fields = table.split(table.rows[i])
        texts = tuple(fields[at] for at in self.text_at)
        for at, text in zip(self.text_at, texts, strict=True):
            if not isinstance(text, str):
                raise UserError(f"{table.place(i)}: column '{table.columns[at]}' is {_shown(text)}, a text is needed")
            if "\0" in text or not _encodes(text):
                bad = "a NUL character" if "\0" in text else "half of a surrogate pair"
                raise UserError(f"{table.place(i)}: column '{table.columns[at]}' contains {bad}")
        return Example(texts, self.labels[i], table.where(i))

    def lines(self, rows: Iterable[int]) -> Iterable[str]:
        """Give the lines of an export of these rows, without the header."""
        return (self.table.line(self.table.rows[i]) for i in rows)


def bind(table: Table, task: TaskConfig) -> Rows:
    """Find the task's columns in `table` and map every row's label by name.

    Raises `UserError` for a missing column (it lists those present), a damaged or an unlabelled row, an unknown label,
    and a table without rows, each with file and line.
    """
    at = {}
    for column in [*task.columns, task.label_column]:
        found = table.find(column, task.rename)
        if found is None:
            near = did_you_mean(column, table.columns)
            hint = f"a column of another name is mapped by +task.rename.ITS_NAME={column}"
            raise UserError(
                f"{table.path}: no column '{column}', which task '{task.name}' needs; "
                f"there are: {listed(table.columns)}{near}; {hint}"
            )
        at[column] = found
    if not table.rows:
        raise UserError(f"{table.path}: no rows")
    values = label_texts(table, at[task.label_column])
    notes = []
    kept = [i for i, value in enumerate(values) if value not in task.skip_labels] if task.skip_labels else []
    if task.skip_labels and len(kept) < len(values):
        notes.append(f"{table.name}: {len(values) - len(kept)} rows left out, labelled {listed(task.skip_labels)}")
        table = replace(table, rows=[table.rows[i] for i in kept], places=[table.places[i] for i in kept])
        values = [values[i] for i in kept]
        if not values:
            raise UserError(f"{table.path}: no row has a label")
    ids = _label_ids(table, task, values)
    if table.numbers_mean and (numbers := sorted({(v, i) for v, i in zip(values, ids, strict=True) if v.isdecimal()})):
        read_as = listed(f"{value} = {task.labels[i]}" for value, i in numbers if value != task.labels[i])
        notes.append(f"{table.name}: label numbers are read as {read_as}")
    return Rows(table, [at[column] for column in task.columns], ids, notes)


def label_texts(table: Table, at: int) -> list[str]:
    """Give every row's label as text; fields of a .tsv are taken off the stripped line, as the reference does."""
    last = at == len(table.columns) - 1
    values = []
    for i, row in enumerate(table.rows):
        if isinstance(row, str):
            value = row.rpartition("\t")[2] if last else row.split("\t", at + 1)[at]
            values.append(value.strip())
            continue
        value = table.split(row)[at]
        if value is ABSENT or value is None:
            raise UserError(f"{table.place(i)}: no label in column '{table.columns[at]}'")
        values.append(value if isinstance(value, str) else json.dumps(value, default=str))
    return values


def _spellings(table: Table, task: TaskConfig, values: set[str]) -> dict[str, int]:
    """Join task.labels, which wins, with the spellings that hold for this kind of source: spelling -> label index.

    A list of another length belongs to other labels than the user's (`task.labels` given on the command line) and is
    left aside; one of the same length must have the same order, or its numbers would silently mean other labels.
    """
    known = {label: i for i, label in enumerate(task.labels)}
    for key, spellings in (("files", task.files.labels), ("hub", task.hub.labels)):
        swapped = [one for i, one in enumerate(spellings) if known.get(one, i) != i]
        if swapped and len(spellings) == len(task.labels):
            raise UserError(
                f"task '{task.name}': task.labels and task.{key}.labels have '{swapped[0]}' at different places; "
                "give both in the same order"
            )
    for extra in table.extra_labels:
        for i, label in enumerate(extra if len(extra) == len(task.labels) else ()):
            if known.setdefault(label, i) != i and label in values:
                raise UserError(
                    f"{table.path}: label '{label}' means '{task.labels[known[label]]}' in one of the task's lists and "
                    f"'{task.labels[i]}' in another; write the labels as {listed(task.labels)}"
                )
    return known


def _label_ids(table: Table, task: TaskConfig, values: list[str]) -> list[int]:
    """Look the labels up by name."""
    found = set(values)
    known = _spellings(table, task, found)
    unknown = found - known.keys()
    if not unknown:
        return [known[value] for value in values]
    i = next(i for i, value in enumerate(values) if value in unknown)
    if values[i] == "-1":
        raise UserError(f"{table.place(i)}: label -1 marks a row without a label; this file cannot be used with labels")
    hint = ""
    if table.guessed and table.places[i] == 1:
        hint = f"; if line 1 is a header, it must name {listed([*task.columns, task.label_column])}"
    raise UserError(
        f"{table.place(i)}: unknown label {values[i]!r} for task '{task.name}'; "
        f"allowed: {listed(known)}{did_you_mean(values[i], known)}{hint}"
    )


def _encodes(text: str) -> bool:
    """Tell whether the text can be written as UTF-8 (JSON can spell lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """Name a value that is no text."""
    return "missing" if value is ABSENT else "null" if value is None else f"the {type(value).__name__} {value!r}"
