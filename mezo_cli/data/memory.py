"""Take rows from a Python program, in the forms that it may have them in: for `finetune` and `load(...).predict`.

They are a list (or a generator) of rows, a `datasets.Dataset`, a DataFrame of pandas, or columns, a mapping of lists.
What looks like them, one row, one text or a mapping of splits, is refused by name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import TaskConfig
from mezo_cli.data.files import arrow_table, of_dataset, records_table
from mezo_cli.data.table import ITEM, Table
from mezo_cli.errors import UserError, join

Rows = Iterable[Any] | Mapping[str, Sequence[Any]]
FILES = {"train": "train_dataset", "test": "eval_dataset"}  # split, of which a run stores the rows -> its argument
FORMS = "rows are a list of mappings, a datasets.Dataset, a DataFrame, or a mapping of columns, which are lists"


def table_of(name: str, given: Any, task: TaskConfig, columns: Sequence[str], nameless: bool = False) -> Table:
    """Return rows as a table, whose places are `NAME, row 0` and so on. Classes of a `Dataset` are their names.

    Args:
        name: the argument that gave them.
        given: the rows.
        task: its other columns are left out where it has labels, unless one that is read is not there: the error that
            follows names them all.
        columns: those that are read.
        nameless: whether a row may also be a text, or a sequence in the order of `columns`.
    """
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise UserError(f"{name}: one {type(given).__name__}: {FORMS}; one text or row is given as [it]")
    if hasattr(given, "with_format") and not isinstance(given, Mapping):
        known = given.column_names or []  # a stream may not know them
        read = given.select_columns(_kept(known, task, columns)) if known else given
        table = arrow_table(name, name, of_dataset(read), ITEM, first=0)
    else:
        if hasattr(given, "notna") and hasattr(given, "columns"):  # a DataFrame: NaN, NaT and NA are missing values
            given = given.astype(object).where(given.notna(), None).to_dict("list")
        rows = _of_columns(name, given) if isinstance(given, Mapping) else list(given)
        names = columns if nameless else ()
        records = [_record(row, f"{name}, row {number}", names) for number, row in enumerate(rows)]
        table = records_table(name, name, records, range(len(records)), ITEM)
    return table.select(_kept(table.columns, task, columns))


def _record(row: Any, where: str, columns: Sequence[str]) -> Mapping[Any, Any]:
    if isinstance(row, Mapping):
        return row
    if isinstance(row, str) and len(columns) == 1:
        return {columns[0]: row}
    if isinstance(row, Sequence) and not isinstance(row, str) and columns and len(row) == len(columns):
        return dict(zip(columns, row, strict=True))
    one = "a text or " * (len(columns) == 1) + f"a mapping of {join(columns) or 'columns'}"
    raise UserError(f"{where}: a {type(row).__name__} where {one} is expected")


def in_memory(text: str, folder: Path) -> str:
    """Return an error line about rows that a run stores in a folder, as one about the argument that gave them."""

    def named(found: re.Match[str]) -> str:
        return FILES[found[1]] + (f", row {int(found[2]) - 1}" if found[2] else "")

    return re.sub(rf"(?:{re.escape(str(folder))}/)?\b(train|test)\.jsonl(?::(\d+))?", named, text)


def _of_columns(name: str, given: Mapping[Any, Any]) -> list[dict[Any, Any]]:
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


def _kept(names: Sequence[str], task: TaskConfig, columns: Sequence[str]) -> Sequence[str]:
    """Return the columns that are read, under their own names; all for a task without labels, or if one is missing."""
    read = [name for name in names if task.rename.get(name, name) in columns]
    return read if task.labels and {*columns} <= {task.rename.get(name, name) for name in read} else names
