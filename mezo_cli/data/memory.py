"""Take rows from a Python program, in the forms that it may have them in: for `finetune` and `load(...).predict`.

They are a list (or a generator) of rows, a `datasets.Dataset`, a DataFrame of pandas, or columns, a mapping of lists.
What looks like them, one row, one text or a mapping of splits, is refused by name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from json import JSONEncoder
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import TaskConfig
from mezo_cli.data.files import class_name
from mezo_cli.data.table import read_columns, row_json
from mezo_cli.errors import UserError, join

Rows = Iterable[Any] | Mapping[str, Sequence[Any]]
FILES = {"train": "train_dataset", "test": "eval_dataset"}  # split, of which a run stores the rows -> its argument
FORMS = "rows are a list of mappings, a datasets.Dataset, a DataFrame, or a mapping of columns, which are lists"


def rows_of(name: str, given: Any, task: TaskConfig) -> list[Any]:
    """Return rows, most of them mappings of columns; the caller says what else each may be.

    Columns of a `Dataset` that the task does not read are None: they are not decoded. Its classes are their names.
    """
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise UserError(f"{name}: one {type(given).__name__}: {FORMS}; one text or row is given as [it]")
    if hasattr(given, "notna") and hasattr(given, "columns"):  # a DataFrame, where NaN, NaT and NA are missing values
        given = given.astype(object).where(given.notna(), None).to_dict("list")
    if isinstance(given, Mapping):
        return _of_columns(name, given)
    if not hasattr(given, "with_format"):
        return list(given)
    rows, columns, features = given.with_format(None), given.column_names or [], given.features or {}
    if columns:  # a stream may not know them
        rows = rows.select_columns(_read(columns, task) or columns)
    classes = {column: feature.names for column, feature in features.items() if hasattr(feature, "names")}
    named = ({column: class_name(value, classes.get(column, ())) for column, value in row.items()} for row in rows)
    return [dict.fromkeys(columns) | row for row in named]


def json_lines(name: str, given: Any, task: TaskConfig) -> list[str]:
    """Return rows as the lines of a JSONL file of the columns that the task reads.

    Where one is not there, the others are null, so that the reader of the file names all of them.
    """
    rows = rows_of(name, given, task)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}, row {number}: a {type(row).__name__} where a mapping of columns is expected")
    columns = dict.fromkeys(column for row in rows for column in row)
    read = _read(columns, task)
    kept = read if {*read_columns(task)} <= {task.rename.get(column, column) for column in read} else columns
    other = JSONEncoder().default if task.labels else str  # which raises TypeError
    return [
        row_json({c: row[c] if c in read else None for c in kept if c in row}, f"{name}, row {number}", other)
        for number, row in enumerate(rows)
    ]


def in_memory(text: str, folder: Path) -> str:
    """Return an error line about rows that a run stores in a folder, as one about the argument that gave them."""

    def named(found: re.Match[str]) -> str:
        return FILES[found[1]] + (f", row {int(found[2]) - 1}" if found[2] else "")

    return re.sub(rf"(?:{re.escape(str(folder))}/)?\b(train|test)\.jsonl(?::(\d+))?", named, text)


def _of_columns(name: str, given: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    """Return the rows of columns."""
    for column, values in given.items():
        if hasattr(values, "column_names"):  # a Dataset
            raise UserError(f"{name}: a {type(given).__name__} of the splits {join(map(str, given))}: give one of them")
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            why = f"one mapping, with a {type(values).__name__} as '{column}'"
            raise UserError(f"{name}: {why}: {FORMS}; one row is given as [row]")
    lengths = {column: len(values) for column, values in given.items()}
    if len({*lengths.values()}) > 1:
        raise UserError(f"{name}: columns of other lengths: {join(f'{column} {n}' for column, n in lengths.items())}")
    return [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]


def _read(columns: Iterable[Any], task: TaskConfig) -> list[Any]:
    """Return those of some columns that the task reads, renamed or not: all for a task without labels."""
    wanted = {*read_columns(task)}
    return [column for column in columns if not task.labels or task.rename.get(column, column) in wanted]
