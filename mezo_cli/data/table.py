"""Hold the rows of one file or hub split, and find what the task reads of them: texts and labels, or all columns."""

import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.errors import SHOWN_CHARACTERS, UserError, did_you_mean, first_line, join, shorten
from mezo_cli.tasks.choice import ChoiceTexts
from mezo_cli.tasks.generate import RowTexts


class _Absent:
    """The value of a key that a JSON object does not have, as opposed to null."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()
LINE, ROW, ITEM = "{}:{}", "{} row {}", "{}, row {}"  # how a place is written: in a file, in a table, in memory
NO_LABEL = frozenset({"", "-1", "?", "nan", "null", "none", "na", "n/a", "<na>"})  # notations of it, in lower case


@dataclass(frozen=True)
class Table:
    """Rows as they were read, in file order.

    A row of a .tsv is its line, which is split into fields only when one is needed; any other row is its fields.
    `line_numbers` are those in the file from 1, or those of rows if the format has no lines; in memory from 0.
    """

    name: str  # short, for Example.where: "train.tsv"
    path: str  # as the user gave it, for error lines
    suffix: str  # of an exported file: .tsv, .csv or .jsonl
    columns: list[str]
    rows: Sequence[Any]
    line_numbers: Sequence[int]
    header: str = ""  # the first line of an export
    place: str = LINE  # how its name and the number of a row make a place
    default_columns: bool = False  # the columns are task.files.columns, since the file has no header
    spelled_as: tuple[str, ...] = ("files", "hub")  # whose `labels` in the task spell the labels, besides task.labels

    def fields(self, i: int) -> Sequence[Any]:
        """Return the fields of row `i`, in the order of the columns."""
        row = self.rows[i]
        return row.removesuffix("\r").split("\t") if isinstance(row, str) else row

    def export(self, other: Callable[[Any], Any] = str) -> str:
        """Return the content of a file of these rows; `other` makes what JSON does not have."""
        if self.suffix == ".tsv":
            lines = [row + "\n" for row in self.rows]
        elif self.suffix == ".csv":
            lines = [csv_line(row) for row in self.rows]
        else:
            pairs = (zip(self.columns, row, strict=True) for row in self.rows)
            records = ({name: value for name, value in row if value is not ABSENT} for row in pairs)
            lines = [row_json(record, self.location(i), other) + "\n" for i, record in enumerate(records)]
        return self.header + "".join(lines)

    def location(self, i: int, full: bool = False) -> str:
        """Return where row `i` is: `train.tsv:17`, or `train.parquet row 17`; if `full`, with the path."""
        return self.place.format(self.path if full else self.name, self.line_numbers[i])

    def take(self, rows: Sequence[int]) -> "Table":
        """Return some of the rows, as a table of their own."""
        numbers = [self.line_numbers[i] for i in rows]
        return replace(self, rows=[self.rows[i] for i in rows], line_numbers=numbers)

    def select(self, names: Sequence[str]) -> "Table":
        """Return the table of some of its columns."""
        columns = [self.columns.index(name) for name in names]
        rows = [[fields[column] for column in columns] for fields in map(self.fields, range(len(self.rows)))]
        return replace(self, columns=list(names), rows=rows)

    def texts(self, i: int, columns: Sequence[int]) -> tuple[str, ...]:
        """Return the texts in some columns of row `i`. They are not stripped."""
        fields = self.fields(i)
        for value, name in ((fields[column], self.columns[column]) for column in columns):
            if not isinstance(value, str):
                kind = f"the {type(value).__name__} {str(value)[:60]!r}"
                what = "missing" if value is ABSENT else "null" if value is None else kind
                raise UserError(f"{self.location(i, full=True)}: column '{name}' is {what}, not a text")
            if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
                bad = "a NUL character" if "\0" in value else "an unpaired surrogate"
                raise UserError(f"{self.location(i, full=True)}: column '{name}' contains {bad}")
        return tuple(fields[column] for column in columns)

    def find_columns(self, columns: Sequence[str], task: TaskConfig, hint: str = "") -> list[int]:
        """Return the index of each column that the task names; `hint` ends the error line of one that is not there."""
        indices = [self.find_column(column, task.rename) for column in columns]
        if None in indices:
            missing = columns[indices.index(None)]
            raise UserError(
                f"{self.path}: no column '{missing}', which task '{task.name}' reads; the columns are: "
                f"{join(self.columns)}{did_you_mean(missing, self.columns)}{hint.format(missing)}"
            )
        if not self.rows:
            raise UserError(f"{self.path}: no rows")
        return [index for index in indices if index is not None]

    def find_column(self, column: str, rename: dict[str, str]) -> int | None:
        """Return the index of the first source column that `rename` maps to `column`, or else of `column` itself.

        The renamed one wins: a hub data set may have class numbers in `label` and the names in `label_text`.
        """
        sources = [source for source, target in rename.items() if target == column]
        for name in [*sources, column]:
            if self.columns.count(name) > 1:
                raise UserError(f"{self.path}: column '{name}' occurs {self.columns.count(name)} times in the header")
            if name in self.columns:
                return self.columns.index(name)
        return None


@dataclass(frozen=True)
class TaskRows:
    """A table, and what a task reads of it.

    Attributes:
        table: the table.
        text_columns: the columns of the texts.
        labels: the label index of every row; -1 in every row of a task without labels.
        all_columns: name -> column, of all columns, for a task without labels; None for every other.
        notes: warnings to show.
    """

    table: Table
    text_columns: list[int]
    labels: list[int]
    all_columns: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)

    def examples(self) -> list[Example]:
        """Return the rows, each with its place in its file."""
        made = []
        for i, label in enumerate(self.labels):
            where = self.table.location(i)
            if self.all_columns is None:
                made.append(Example(self.table.texts(i, self.text_columns), label, where))
                continue
            fields = self.table.fields(i)
            row = {name: fields[column] for name, column in self.all_columns.items() if fields[column] is not ABSENT}
            # with the values that JSON has: a date of Parquet becomes a text, NaN null
            values = json.loads(row_json(row, self.table.location(i, full=True)), parse_constant=lambda name: None)
            made.append(Example((), -1, where, values))
        return made

    def take(self, rows: Sequence[int]) -> "TaskRows":
        """Return some of the rows, in this order."""
        return replace(self, table=self.table.take(rows), labels=[self.labels[i] for i in rows])


@dataclass(frozen=True)
class Source:
    """The rows of one data source, or those of a run that are drawn from it; None for a split that is not there.

    `notes` are warnings to show, and `revision` is the commit of a data set on the hub. Of the rows of a run, `pool`
    are those that demonstrations are drawn from.
    """

    train: TaskRows
    dev: TaskRows | None = None
    test: TaskRows | None = None
    notes: list[str] = field(default_factory=list)
    revision: str | None = None
    pool: TaskRows | None = None

    @property
    def columns(self) -> list[str]:
        """The columns of the rows of a task without labels, by the task's names."""
        return [*(self.train.all_columns or {})]


def csv_line(row: Sequence[str]) -> str:
    """Return a row as CSV with minimal quoting, as pandas writes it."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(row)
    return out.getvalue()


def read_columns(task: TaskConfig) -> list[str]:
    """Return the columns that every row has: texts and label, or those of the prompt and the answer."""
    if task.labels:
        return [*task.columns, task.label_column]
    return RowTexts(task).columns if task.choice.prompt is None else ChoiceTexts(task).columns


def task_rows(table: Table, task: TaskConfig) -> TaskRows:
    """Return the table with what the task reads of it: texts and labels, or all columns if the task has no labels.

    Labels are mapped by name.
    """
    hint = "; to use a column of another name: +task.rename.ITS_NAME={}"
    indices = table.find_columns(read_columns(task), task, hint)
    if not task.labels:
        names = dict.fromkeys(task.rename.get(name, name) for name in table.columns)
        every = dict(zip(names, table.find_columns(list(names), task), strict=True))
        return TaskRows(table, [], [-1] * len(table.rows), every)
    *text_columns, label_column = indices
    values, notes = label_texts(table, label_column), []
    kept = [i for i, value in enumerate(values) if value not in task.skip_labels]
    if len(kept) < len(values):
        notes.append(f"{table.name}: {len(values) - len(kept)} rows left out, with label {join(task.skip_labels)}")
        table, values = table.take(kept), [values[i] for i in kept]
        if not values:
            raise UserError(f"{table.path}: no row has a label")
    known = _label_numbers(table, task, values)
    numbers = sorted({(value, i) for value, i in known.items() if plain_label(value).isdecimal()})
    if len(table.spelled_as) > 1 and numbers:  # numbers may follow another order than the task's
        read_as = join(f"{value} = {task.labels[i]}" for value, i in numbers if value != task.labels[i])
        notes.append(f"{table.name}: label numbers are read as {read_as}")
    for column in text_columns if table.suffix == ".tsv" else ():
        quoted = [table.fields(i)[column] for i, row in enumerate(table.rows) if '"' in row]
        quoted = [text for text in quoted if '"' in text]
        # as in CSV: each is in quotes, and some quote inside is doubled
        if all(re.fullmatch('"([^"]|"")*"', text) for text in quoted) and any('""' in text[1:-1] for text in quoted):
            why = "a .tsv has no quoting; save the file as .csv"
            notes.append(
                f"{table.name}: quotes around texts of column '{table.columns[column]}' are read as text: {why}"
            )
    return TaskRows(table, text_columns, [known[value] for value in values], notes=notes)


def row_json(row: Mapping[str, Any], where: str, other: Callable[[Any], Any] = str) -> str:
    """Return a row as one line of JSON: arrays as lists, and what else JSON does not have as `other` makes it."""

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else other(value)

    cells = []
    for column, value in row.items():
        try:
            text = json.dumps(value, ensure_ascii=False, default=plain)
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: column '{column}' contains an unpaired surrogate") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{where}: column '{column}': {first_line(error)}") from error
        cells.append(f"{json.dumps(str(column), ensure_ascii=False)}: {text}")
    return f"{{{', '.join(cells)}}}"


def label_texts(table: Table, column: int) -> list[str]:
    """Return every row's label as text. In a .tsv it is a field of the stripped line, as in the published code."""
    values = []
    for i, row in enumerate(table.rows):
        value = table.fields(i)[column]
        text = value if isinstance(value, str) else "" if value is ABSENT else json.dumps(value, default=str)
        values.append(text.strip() if isinstance(row, str) else text)
    return values


def plain_label(text: str) -> str:
    """Return a label in the one spelling of what formats write differently: `true` for True, `1` for 1.0."""
    return text.lower() if text.lower() in ("true", "false") else re.sub(r"(?<=\d)\.0+$", "", text)


def has_no_label(text: str, task: TaskConfig) -> bool:
    """Return whether a row's label is one of the notations of having none, and no label of the task."""
    text = plain_label(text.strip()).lower()
    return text in NO_LABEL and text not in {label.lower() for label in chain(task.labels, *task.lists().values())}


def _label_numbers(table: Table, task: TaskConfig, values: list[str]) -> dict[str, int]:
    """Return label of a row -> its index, by name: from task.labels, and the spellings of this kind of source.

    Spellings that are no names of task.labels go by its order; in a list of another length they are ignored. `values`
    are the labels of the rows.
    """
    known, given = {label: i for i, label in enumerate(task.labels)}, dict.fromkeys(values)
    lists = {key: names for key, names in task.lists().items() if key.split(".")[1] in table.spelled_as}
    for key, names in lists.items():
        for i, label in enumerate(names if len(names) == len(task.labels) else ()):
            if label in task.labels:
                continue
            if label in given and (why := task.reordered()):
                raise UserError(f"{table.path}: label '{label}' is one of {key}, which go by their order: {why}")
            if known.setdefault(label, i) != i and label in given:
                raise UserError(
                    f"{table.path}: label '{label}' means '{task.labels[known[label]]}' by task.files.labels and "
                    f"'{task.labels[i]}' by {key}; give both in the order of task.labels ({join(task.labels)})"
                )
    plain = {plain_label(label): i for label, i in known.items()}
    found = {value: known.get(value, plain.get(plain_label(value), -1)) for value in given}
    if -1 not in found.values():
        return found
    i = next(i for i, value in enumerate(values) if found[value] < 0)
    where, shown, hint = table.location(i, full=True), shorten(values[i], SHOWN_CHARACTERS), ""
    if has_no_label(values[i], task):
        count, leave = sum(has_no_label(one, task) for one in values), f"task.skip_labels=[{json.dumps(values[i])}]"
        why = f"{count} of {len(values)} rows are without a label; label them, or leave them out: {shlex.quote(leave)}"
        raise UserError(f"{where}: no label in column '{task.label_column}' (it has {shown!r}); {why}")
    if table.default_columns and table.line_numbers[i] == 1:
        hint = f"; if line 1 is a header, it must name {join([*task.columns, task.label_column])}"
    hint = did_you_mean(shown, known) + hint
    raise UserError(f"{where}: unknown label {shown!r} for task '{task.name}'; allowed: {join(known)}{hint}")
