"""Hold the rows of one file or hub split, and find the task's texts and labels in them."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.errors import UserError, did_you_mean, join


class _Absent:
    """The value of a key that a JSON object does not have, as opposed to null."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


@dataclass(frozen=True)
class Table:
    """Rows as they were read, in file order. A row is split into fields only when a field is needed.

    `split(row)` returns the row's fields in the order of `columns`, `line(row)` its line in an export, with its line
    end. `line_numbers` are those in the file (or row numbers, if the format has no lines), from 1.
    """

    name: str  # short, for Example.where: "train.tsv"
    path: str  # as the user gave it, for error lines
    suffix: str  # of an exported file: .tsv, .csv or .jsonl
    columns: list[str]
    rows: Sequence[Any]
    line_numbers: Sequence[int]
    split: Callable[[Any], Sequence[Any]]
    line: Callable[[Any], str]
    header: str = ""  # the first line of an export
    has_lines: bool = True
    ambiguous_numbers: bool = False  # label numbers may follow another order than the task's: note how they are read
    default_columns: bool = False  # the columns are task.files.columns, since the file has no header
    label_spellings: tuple[tuple[str, ...], ...] = ()  # of the labels in this source, besides task.labels

    def location(self, i: int) -> str:
        """Return where row `i` is, in short: `train.tsv:17`, or `train.parquet row 17`."""
        return self.name + (f":{self.line_numbers[i]}" if self.has_lines else f" row {self.line_numbers[i]}")

    def error_location(self, i: int) -> str:
        """Return where row `i` is, for an error line: with the path as the user gave it."""
        return self.path + (f":{self.line_numbers[i]}" if self.has_lines else f" row {self.line_numbers[i]}")

    def find_column(self, column: str, rename: dict[str, str]) -> int | None:
        """Return the index of the first source column that `rename` maps to `column`, or else of `column` itself.

        The renamed one wins: a hub data set may have class numbers in `label` and the names in `label_text`.

        Raises:
            UserError: when the name occurs twice in the header.
        """
        sources = [source for source, target in rename.items() if target == column]
        for name in [*sources, column]:
            if self.columns.count(name) > 1:
                raise UserError(f"{self.path}: column '{name}' occurs {self.columns.count(name)} times in the header")
            if name in self.columns:
                return self.columns.index(name)
        return None


@dataclass(frozen=True)
class LabelledRows:
    """A table with the label index of every row, and the columns of the texts."""

    table: Table
    text_columns: list[int]
    labels: list[int]
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def example(self, i: int) -> Example:
        """Return row `i`. Texts are not stripped.

        Raises:
            UserError: for a value that is not a text.
        """
        table = self.table
        fields = table.split(table.rows[i])
        texts = tuple(fields[column] for column in self.text_columns)
        for column, text in zip(self.text_columns, texts, strict=True):
            check_text(text, table.error_location(i), table.columns[column])
        return Example(texts, self.labels[i], table.location(i))

    def take(self, rows: Sequence[int]) -> "LabelledRows":
        """Return some of the rows, as the rows of a table of their own."""
        kept, numbers = [self.table.rows[i] for i in rows], [self.table.line_numbers[i] for i in rows]
        table = replace(self.table, rows=kept, line_numbers=numbers)
        return replace(self, table=table, labels=[self.labels[i] for i in rows])

    def lines(self, rows: Iterable[int]) -> Iterable[str]:
        """Return the lines of an export of these rows, without the header."""
        return (self.table.line(self.table.rows[i]) for i in rows)


@dataclass(frozen=True)
class Source:
    """The labelled rows of one data source.

    `dev` and `test` are None where the source has none. `revision` is the commit of a data set on the hub.
    """

    train: LabelledRows
    dev: LabelledRows | None = None
    test: LabelledRows | None = None
    notes: list[str] = field(default_factory=list)
    revision: str | None = None


def check_text(value: Any, where: str, column: str) -> None:
    """Refuse a value that is not a text, or that UTF-8 cannot represent.

    Raises:
        UserError: naming the place and the column.
    """
    if not isinstance(value, str):
        raise UserError(f"{where}: column '{column}' is {_describe(value)}, not a text")
    if "\0" in value or not _is_utf8(value):
        bad = "a NUL character" if "\0" in value else "an unpaired surrogate"
        raise UserError(f"{where}: column '{column}' contains {bad}")


def near_column(wanted: str, columns: Sequence[str]) -> str:
    """Return the end of an error line about a missing column: the nearest one, or that the separator is another."""
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), (",", "commas")):
        if len(columns) == 1 and wanted in columns[0].split(separator):
            return f" (its fields are separated by {name}: a .csv needs commas, a .tsv tabs)"
    return did_you_mean(wanted, columns)


def label_rows(table: Table, task: TaskConfig) -> LabelledRows:
    """Return the table with the task's text columns and the label index of every row. Labels are mapped by name.

    Raises:
        UserError: for a missing column, a damaged row, a row without a label, an unknown label, and a table without
            rows; the line names file and line number.
    """
    indices = {}
    for column in [*task.columns, task.label_column]:
        index = table.find_column(column, task.rename)
        if index is None:
            near = near_column(column, table.columns)
            hint = f"to use a column of another name: +task.rename.ITS_NAME={column}"
            raise UserError(
                f"{table.path}: no column '{column}', which task '{task.name}' needs; "
                f"the columns are: {join(table.columns)}{near}; {hint}"
            )
        indices[column] = index
    if not table.rows:
        raise UserError(f"{table.path}: no rows")
    values = label_texts(table, indices[task.label_column])
    notes = []
    kept = [i for i, value in enumerate(values) if value not in task.skip_labels] if task.skip_labels else []
    if task.skip_labels and len(kept) < len(values):
        notes.append(f"{table.name}: {len(values) - len(kept)} rows left out, with label {join(task.skip_labels)}")
        table = replace(table, rows=[table.rows[i] for i in kept], line_numbers=[table.line_numbers[i] for i in kept])
        values = [values[i] for i in kept]
        if not values:
            raise UserError(f"{table.path}: no row has a label")
    ids = _label_ids(table, task, values)
    numbers = sorted({(value, i) for value, i in zip(values, ids, strict=True) if value.isdecimal()})
    if table.ambiguous_numbers and numbers:
        read_as = join(f"{value} = {task.labels[i]}" for value, i in numbers if value != task.labels[i])
        notes.append(f"{table.name}: label numbers are read as {read_as}")
    return LabelledRows(table, [indices[column] for column in task.columns], ids, notes)


def label_texts(table: Table, column: int) -> list[str]:
    """Return every row's label as text. In a .tsv it is a field of the stripped line, as in the reference."""
    last = column == len(table.columns) - 1
    values = []
    for i, row in enumerate(table.rows):
        if isinstance(row, str):
            value = row.rpartition("\t")[2] if last else row.split("\t", column + 1)[column]
            values.append(value.strip())
            continue
        value = table.split(row)[column]
        if value is ABSENT or value is None:
            raise UserError(f"{table.error_location(i)}: no label in column '{table.columns[column]}'")
        values.append(value if isinstance(value, str) else json.dumps(value, default=str))
    return values


def _spellings(table: Table, task: TaskConfig, values: set[str]) -> dict[str, int]:
    """Return spelling -> label index, from task.labels (which wins) and the spellings of this kind of source.

    A list of another length does not belong to the user's `task.labels` and is ignored. One of the same length must
    have the same order, or its numbers would silently mean other labels.
    """
    known = {label: i for i, label in enumerate(task.labels)}
    for key, spellings in (("files", task.files.labels), ("hub", task.hub.labels)):
        swapped = [one for i, one in enumerate(spellings) if known.get(one, i) != i]
        if swapped and len(spellings) == len(task.labels):
            raise UserError(
                f"task '{task.name}': task.labels and task.{key}.labels have '{swapped[0]}' at different positions; "
                "give both in the same order"
            )
    for other in table.label_spellings:
        for i, label in enumerate(other if len(other) == len(task.labels) else ()):
            if known.setdefault(label, i) != i and label in values:
                raise UserError(
                    f"{table.path}: label '{label}' means '{task.labels[known[label]]}' in one of the task's lists and "
                    f"'{task.labels[i]}' in another; write the labels as {join(task.labels)}"
                )
    return known


def _label_ids(table: Table, task: TaskConfig, values: list[str]) -> list[int]:
    """Return the label index of every row."""
    found = set(values)
    known = _spellings(table, task, found)
    unknown = found - known.keys()
    if not unknown:
        return [known[value] for value in values]
    i = next(i for i, value in enumerate(values) if value in unknown)
    if values[i] == "-1":
        raise UserError(f"{table.error_location(i)}: label -1 marks a row without a label")
    hint = ""
    if table.default_columns and table.line_numbers[i] == 1:
        hint = f"; if line 1 is a header, it must name {join([*task.columns, task.label_column])}"
    raise UserError(
        f"{table.error_location(i)}: unknown label {values[i]!r} for task '{task.name}'; "
        f"allowed: {join(known)}{did_you_mean(values[i], known)}{hint}"
    )


def _is_utf8(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8 (JSON can contain unpaired surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe(value: Any) -> str:
    """Return what a value is that is not a text, for an error line."""
    return "missing" if value is ABSENT else "null" if value is None else f"the {type(value).__name__} {value!r}"
