"""Readers of one file each: .tsv (GLUE), .csv, .jsonl, .json and .parquet become a `Table`.

Every reader raises `UserError` with file and line for bytes that are not UTF-8, NUL bytes, and rows whose number of
fields is not the header's.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mezo_cli.data.table import ABSENT, Table
from mezo_cli.errors import UserError, listed
from mezo_cli.schema import TaskConfig

SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")


def read(paths: Sequence[Path], task: TaskConfig) -> Table:
    """Read one file (or the shards of one parquet split) into a table. Labels are not looked at yet."""
    path = paths[0]
    if path.suffix == ".parquet":
        return _parquet(paths, task)
    text = _text(path)
    if path.suffix == ".tsv":
        return _tsv(path, text, task)
    if path.suffix == ".csv":
        return _csv(path, text, task)
    text = text.removeprefix("\ufeff")
    array = path.suffix == ".json" and text.lstrip().startswith("[")
    return _records(path, _json_array(path, text) if array else _jsonl(path, text), task, by_line=not array)


def from_records(
    name: str, path: str, columns: list[str], rows: Sequence[Sequence[Any]], extra_labels: tuple[tuple[str, ...], ...]
) -> Table:
    """Make a table of rows that have no file lines (parquet, hub); an export of them is JSONL."""
    return Table(
        name=name,
        path=path,
        suffix=".jsonl",
        columns=columns,
        rows=rows,
        places=range(1, len(rows) + 1),
        split=_same,
        line=lambda row: _json_line(columns, row),
        by_line=False,
        extra_labels=extra_labels,
    )


def named_labels(task: TaskConfig) -> tuple[tuple[str, ...], ...]:
    """Spellings of the labels that hold in files with named columns, whose origin is not known."""
    return (tuple(task.files.labels), tuple(task.hub.labels))


def _text(path: Path) -> str:
    """Read UTF-8 strictly; a byte order mark stays, for exports keep the bytes."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not data.strip():
        raise UserError(f"{path}: empty file")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path}:1: the file is UTF-16; save it as UTF-8")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise UserError(f"{path}:{line}: a NUL byte; the file is damaged or no text")
    if b"\r" in data and b"\n" not in data:
        raise UserError(f"{path}:1: the lines end in a bare CR; save the file with LF or CRLF line ends")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 ({error.reason})") from None


def _tsv(path: Path, text: str, task: TaskConfig) -> Table:
    """GLUE's form: split at tabs, no quoting, lines end in LF or CRLF (a lone CR or U+2028 is part of a text)."""
    rows = text.split("\n")
    while not rows[-1].strip("\r"):  # empty lines at the end are no rows
        rows.pop()
    columns, guessed = _columns(path, rows[0].lstrip("\ufeff").rstrip("\r").split("\t"), task)
    header, first = ("", 1) if guessed else (rows[0] + "\n", 2)
    rows = [rows[0].removeprefix("\ufeff"), *rows[1:]] if guessed else rows[1:]
    tabs = len(columns) - 1
    for i, row in enumerate(rows):
        if row.count("\t") != tabs:
            raise UserError(_damaged(f"{path}:{first + i}", row.count("\t") + 1, columns))
    return Table(
        name=path.name,
        path=str(path),
        suffix=".tsv",
        columns=columns,
        rows=rows,
        places=range(first, first + len(rows)),
        split=_tsv_fields,
        line=lambda row: row + "\n",
        header=header,
        guessed=guessed,
        extra_labels=(tuple(task.files.labels),),
    )


def _tsv_fields(row: str) -> list[str]:
    return row.removesuffix("\r").split("\t")


def _csv(path: Path, text: str, task: TaskConfig) -> Table:
    """Standard quoting; a field may run over lines. Exports are written anew with least quoting, as pandas does."""
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    rows, places, start = [], [], 1
    try:
        for row in reader:
            if row:
                rows.append(row)
                places.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{start}: damaged quoting in the row that starts here ({error})") from None
    columns, guessed = _columns(path, rows[0], task)
    if not guessed:
        rows, places = rows[1:], places[1:]
    for row, place in zip(rows, places, strict=True):
        if len(row) != len(columns):
            raise UserError(_damaged(f"{path}:{place}", len(row), columns))
    return Table(
        name=path.name,
        path=str(path),
        suffix=".csv",
        columns=columns,
        rows=rows,
        places=places,
        split=_same,
        line=_csv_line,
        header="" if guessed else _csv_line(columns),
        guessed=guessed,
        extra_labels=(tuple(task.files.labels),) if guessed else named_labels(task),
        numbers_mean=not guessed,
    )


def _csv_line(row: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(row)
    return out.getvalue()


def _columns(path: Path, first: list[str], task: TaskConfig) -> tuple[list[str], bool]:
    """Decide whether the first line is a header: it is when it names the task's columns, or when the task knows no
    header-less form. Returns (names of the columns, whether they came from task.files.columns)."""
    needed = {*task.columns, task.label_column}
    renamed = {*first, *(task.rename[name] for name in first if name in task.rename)}
    if not task.files.columns or needed <= renamed:
        return first, False
    if len(first) == len(task.files.columns):
        return list(task.files.columns), True
    if needed & renamed:
        return first, False  # a header that lacks columns: the caller says which
    raise UserError(_damaged(f"{path}:1", len(first), task.files.columns))


def _damaged(place: str, count: int, columns: list[str]) -> str:
    shown = listed(columns) if len(columns) <= 6 else f"{listed(columns[:5])}, ... {columns[-1]}"
    return f"{place}: damaged row: {count} field{'s' * (count != 1)} where {len(columns)} belong ({shown})"


def _jsonl(path: Path, text: str) -> list[tuple[int, Any]]:
    """One JSON object a line; empty lines are passed over."""
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                found.append((number, json.loads(line)))
            except (json.JSONDecodeError, RecursionError) as error:
                raise UserError(f"{path}:{number}: not a JSON object: {error}") from None
    return found


def _json_array(path: Path, text: str) -> list[tuple[int, Any]]:
    try:
        return list(enumerate(json.loads(text), start=1))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}:{getattr(error, 'lineno', 1)}: not a JSON array: {error}") from None


def _records(path: Path, objects: list[tuple[int, Any]], task: TaskConfig, by_line: bool) -> Table:
    columns: dict[str, None] = {}  # an ordered set: every key that some row has
    for number, record in objects:
        if not isinstance(record, dict):
            place = f"{path}:{number}" if by_line else f"{path} row {number}"
            raise UserError(f"{place}: damaged row: a JSON object is needed, not {type(record).__name__}")
        columns.update(dict.fromkeys(record))
    names = list(columns)
    return Table(
        name=path.name,
        path=str(path),
        suffix=".jsonl",
        columns=names,
        rows=[tuple(record.get(name, ABSENT) for name in names) for _, record in objects],
        places=[number for number, _ in objects],
        split=_same,
        line=lambda row: _json_line(names, row),
        by_line=by_line,
        extra_labels=named_labels(task),
        numbers_mean=True,
    )


def _json_line(columns: Sequence[str], row: Sequence[Any]) -> str:
    record = {name: value for name, value in zip(columns, row, strict=True) if value is not ABSENT}
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


def _parquet(paths: Sequence[Path], task: TaskConfig) -> Table:
    """Integers of a ClassLabel column become their names (the hub's integers have another order than the tasks)."""
    import pyarrow as pa  # heavy, and here only
    import pyarrow.parquet as pq

    try:
        table = pa.concat_tables([pq.read_table(path, partitioning=None) for path in paths])
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{paths[0]}: no readable Parquet file: {str(error).splitlines()[0]}") from None
    values = []
    for name in table.column_names:
        column = table.column(name).to_pylist()
        names = _class_names(table.schema.metadata or {}, name)
        values.append([class_name(value, names) for value in column] if names else column)
    name = paths[0].name if len(paths) == 1 else f"{paths[0].name} ... {paths[-1].name}"
    path = str(paths[0].with_name(name))
    rows = list(zip(*values, strict=True))
    return replace(from_records(name, path, table.column_names, rows, named_labels(task)), numbers_mean=True)


def class_name(value: Any, names: Sequence[str]) -> Any:
    """Turn a ClassLabel's integer into its name; what is no such integer (-1, null) stays."""
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def _class_names(metadata: dict[bytes, bytes], column: str) -> list[str] | None:
    """Read a column's class names from the metadata that the `datasets` library writes into its Parquet files."""
    try:
        feature = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"][column]
    except (ValueError, KeyError, TypeError):
        return None
    return feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None


def _same(row: Sequence[Any]) -> Sequence[Any]:
    return row
