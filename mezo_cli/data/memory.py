"""Take rows from a Python program, in the forms that it may have them in: for `finetune` and `load(...).predict`.

They are a list (or a generator) of rows, a `datasets.Dataset`, a DataFrame of pandas, or columns, a mapping of lists.
What looks like them, one row, one text or a mapping of splits, is refused by name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mezo_cli.config.schema import TaskConfig
from mezo_cli.data.files import class_name
from mezo_cli.data.table import read_columns, row_json
from mezo_cli.errors import UserError, join

Rows = Iterable[Any] | Mapping[str, Sequence[Any]]
FILES = {"train": "train_dataset", "test": "eval_dataset"}  # split, of which a run stores the rows -> its argument
FORMS = "rows are a list of mappings, a datasets.Dataset, a DataFrame, or a mapping of columns, which are lists"


def rows_of(name: str, given: Any, task: TaskConfig) -> list[Any]:
    """Return rows, most of them mappings; the caller says what else each may be.

    A mapping has all columns, with None for those that the task does not read, which are not looked at. Numbers of
    classes in a `Dataset` are their names.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise UserError(f"{name}: one {type(given).__name__}: {FORMS}; one text or row is given as [it]")
    given = _columns_of_frame(name, given) if hasattr(given, "notna") and hasattr(given, "columns") else given
    if isinstance(given, Mapping):
        return _of_columns(name, given, task)
    columns, features = getattr(given, "column_names", None), getattr(given, "features", None) or {}
    if columns and hasattr(given, "with_format"):  # a Dataset
        given = given.with_format(None).select_columns(_read(columns, task) or columns)
    classes = {key: feature.names for key, feature in features.items() if hasattr(feature, "names")}
    return [_looked_at(row, columns or row, classes, task) if isinstance(row, Mapping) else row for row in given]


def json_lines(name: str, given: Any, task: TaskConfig) -> list[str]:
    """Return rows as the lines of a JSONL file of the columns that the task reads; all where one is not there."""
    rows = rows_of(name, given, task)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}, row {number}: a {type(row).__name__} where a mapping of columns is expected")
    columns = dict.fromkeys(column for row in rows for column in row)
    read = _read(columns, task)
    kept = read if {*read_columns(task)} <= {task.rename.get(column, column) for column in read} else columns
    other = _refuse if task.labels else str
    return [
        row_json({column: row[column] for column in kept if column in row}, f"{name}, row {number}", other)
        for number, row in enumerate(rows)
    ]


def in_memory(text: str, folder: Path) -> str:
    """Return an error line about rows that a run stores in a folder, as one about the argument that gave them."""

    def named(found: re.Match[str]) -> str:
        return FILES[found[1]] + (f", row {int(found[2]) - 1}" if found[2] else "")

    return re.sub(rf"(?:{re.escape(str(folder))}/)?\b(train|test)\.jsonl(?::(\d+))?", named, text)


def _columns_of_frame(name: str, frame: Any) -> dict[str, list[Any]]:
    """Return the columns of a DataFrame, with None for what is missing there (NaN, NaT, NA)."""
    names = [str(column) for column in frame.columns]
    if len({*names}) < len(names):
        raise UserError(f"{name}: two columns of one name in {join(names)}")
    values = frame.astype(object).where(frame.notna(), None)
    return {column: values.iloc[:, i].tolist() for i, column in enumerate(names)}


def _of_columns(name: str, given: Mapping[Any, Any], task: TaskConfig) -> list[dict[str, Any]]:
    """Return the rows of columns."""
    for column, values in given.items():
        if hasattr(values, "column_names"):  # a Dataset
            raise UserError(f"{name}: a {type(given).__name__} of the splits {join(map(str, given))}: give one of them")
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            why = f"one mapping, with a {type(values).__name__} as '{column}'"
            raise UserError(f"{name}: {why}: {FORMS}; one row is given as [row]")
    lengths = {str(column): len(values) for column, values in given.items()}
    if len({*lengths.values()}) > 1:
        raise UserError(f"{name}: columns of other lengths: {join(f'{name} {n}' for name, n in lengths.items())}")
    rows = (dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True))
    return [_looked_at(row, given, {}, task) for row in rows]


def _looked_at(
    row: Mapping[Any, Any], columns: Iterable[Any], classes: Mapping[str, Sequence[str]], task: TaskConfig
) -> dict[str, Any]:
    """Return a row of all columns, None for one that the task does not read."""
    read = {column: class_name(row[column], classes.get(column, ())) for column in _read(row, task)}
    return {str(column): read.get(column) for column in columns}


def _read(columns: Iterable[Any], task: TaskConfig) -> list[Any]:
    """Return those of some columns that the task reads, renamed or not: all for a task without labels."""
    wanted = {*read_columns(task)}
    return [column for column in columns if not task.labels or task.rename.get(column, column) in wanted]


def _refuse(value: Any) -> NoReturn:
    raise TypeError(f"a {type(value).__name__} is no text and no label")
