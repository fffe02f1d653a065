"""Read a .tsv (GLUE), .csv, .jsonl, .json or .parquet file into a `Table`.

All readers raise `UserError` with file and line for bytes that are not UTF-8, and for rows that have another
number of fields than the header.
"""

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import TaskConfig
from mezo_cli.data.table import ABSENT, LINE, ROW, Table, csv_line, read_columns
from mezo_cli.errors import UserError, join

SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")
SEPARATORS = {";": "semicolons", ",": "commas", "\t": "tabs"}
_FIELD_LIMIT = min(sys.maxsize, 2**31 - 1)  # of the csv module, which counts in a C long


def read_table(paths: Sequence[Path], task: TaskConfig) -> Table:
    """Return the table of one file, or of all shards of a parquet split. Labels are not checked here."""
    path = paths[0]
    if path.suffix == ".parquet":
        return _parquet(paths)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not data.removeprefix(b"\xef\xbb\xbf").strip():
        raise UserError(f"{path}: empty file")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path}:1: the file is UTF-16; save it as UTF-8")
    try:
        text = data.decode("utf-8")  # with its byte order mark, since exports keep the bytes
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 ({error.reason})") from None
    if path.suffix in (".tsv", ".csv"):
        first, own = text.removeprefix("\ufeff").split("\n", 1)[0].rstrip("\r"), "," if path.suffix == ".csv" else "\t"
        for mark, name in SEPARATORS.items() if own not in first else ():  # of another format
            names = [task.rename.get(word, word) for word in (field.strip(' "') for field in first.split(mark))]
            if len(names) > 1 and ({*names} & {*read_columns(task)} or len(names) == len(task.files.columns)):
                raise UserError(f"{path}:1: its fields are separated by {name}: a .csv needs commas, a .tsv tabs")
        return (_tsv if path.suffix == ".tsv" else _csv)(path, text, task)
    return _json(path, text.removeprefix("\ufeff"), task)


def _tsv(path: Path, text: str, task: TaskConfig) -> Table:
    """Read GLUE's format: fields between tabs, no quoting. Lines end in LF or CRLF; a lone CR or U+2028 is text."""
    rows = text.split("\n")
    while not rows[-1].strip("\r"):  # empty lines at the end are not rows
        rows.pop()
    columns, has_header = _columns(path, rows[0].lstrip("\ufeff").rstrip("\r").split("\t"), task)
    header, first = (rows[0] + "\n", 2) if has_header else ("", 1)
    rows = rows[1:] if has_header else [rows[0].removeprefix("\ufeff"), *rows[1:]]
    numbers = range(first, first + len(rows))
    for row, number in zip(rows, numbers, strict=True):
        _check_count(f"{path}:{number}", row.count("\t") + 1, columns)
    return Table(path.name, str(path), ".tsv", columns, rows, numbers, header, LINE, not has_header, ("files",))


def _csv(path: Path, text: str, task: TaskConfig) -> Table:
    """Read CSV with standard quoting; a field may span lines. Exports use minimal quoting, as pandas does."""
    csv.field_size_limit(_FIELD_LIMIT)  # of the process: by default 131,072 characters
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    rows, numbers, start = [], [], 1
    try:
        for row in reader:
            if row:
                rows.append(row)
                numbers.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{start}: damaged quoting in the row that starts here ({error})") from None
    columns, has_header = _columns(path, rows[0], task)
    for row, number in zip(rows, numbers, strict=True):
        _check_count(f"{path}:{number}", len(row), columns)
    if has_header:
        return Table(path.name, str(path), ".csv", columns, rows[1:], numbers[1:], csv_line(columns))
    return Table(path.name, str(path), ".csv", columns, rows, numbers, "", LINE, True, ("files",))


def _columns(path: Path, first: list[str], task: TaskConfig) -> tuple[list[str], bool]:
    """Return the column names, and whether the first line is a header.

    It is one if it names the task's columns, or if the task has no format without a header (`task.files.columns`).
    """
    needed = {*read_columns(task)}
    renamed = {*first, *(task.rename[name] for name in first if name in task.rename)}
    if not task.files.columns or needed <= renamed:
        return first, True
    if len(first) == len(task.files.columns):
        return list(task.files.columns), False
    if not needed & renamed:
        _check_count(f"{path}:1", len(first), task.files.columns)
    return first, True  # a header that lacks columns: the caller names them


def _check_count(location: str, count: int, columns: list[str]) -> None:
    if count != len(columns):
        names = join(columns) if len(columns) <= 6 else f"{join(columns[:5])}, ... {columns[-1]}"
        fields = f"{count} field{'s' * (count != 1)}"
        raise UserError(f"{location}: damaged row: {fields}, expected {len(columns)} ({names})")


def _json(path: Path, text: str, task: TaskConfig) -> Table:
    """Read one JSON object per line, where empty lines are skipped; or in a .json file an array of them."""
    has_lines = path.suffix != ".json" or not text.lstrip().startswith("[")
    rows, number = [], 1
    try:
        if has_lines:
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    rows.append((number, json.loads(line, object_pairs_hook=_object)))
        else:
            rows = list(enumerate(json.loads(text, object_pairs_hook=_object), 1))
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of more than 4,300 digits
        place, kind = (number, "object") if has_lines else (getattr(error, "lineno", 1), "array")
        needed = "" if kind == "array" else "; one object per row is needed, each in a line of its own"
        raise UserError(f"{path}:{place}: not a JSON {kind}: {error}{needed}") from None
    place = LINE if has_lines else ROW
    for number, record in rows:
        if not isinstance(record, dict):
            where = place.format(path, number)
            raise UserError(f"{where}: damaged row: a JSON object is needed, not {type(record).__name__}")
    if task.labels and len(rows) == 1 and all(isinstance(value, dict | list) for value in rows[0][1].values()):
        why = "this is one object, of columns (pandas: to_json(FILE, orient='records'))"
        raise UserError(f"{path}: one object per row is needed, and {why}")
    numbers, records = zip(*rows, strict=True) if rows else ((), ())
    return records_table(path.name, str(path), records, numbers, place)


def records_table(
    name: str, path: str, records: Sequence[Mapping[str, Any]], numbers: Sequence[int], place: str
) -> Table:
    """Return mappings as a table with every key of any of them; the other arguments are those of `Table`."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    fields = [tuple(record.get(name, ABSENT) for name in columns) for record in records]
    return Table(name, path, ".jsonl", columns, fields, numbers, place=place)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):  # the last value alone would count
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def _parquet(paths: Sequence[Path]) -> Table:
    import pyarrow as pa  # slow to import, and needed here only
    import pyarrow.parquet as pq

    try:
        table = pa.concat_tables([pq.read_table(path, partitioning=None) for path in paths])
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{paths[0]}: no readable Parquet file: {str(error).splitlines()[0]}") from None
    name = paths[0].name if len(paths) == 1 else f"{paths[0].name} ... {paths[-1].name}"
    return arrow_table(name, str(paths[0].with_name(name)), table)


def arrow_table(name: str, path: str, table: Any, place: str = ROW, first: int = 1, **options: Any) -> Table:
    """Return a pyarrow table. Integers of a ClassLabel become names: the hub's class order is not the task's.

    The names are in the metadata that the `datasets` library writes. `first` is the number of the first row,
    `options` are further fields of `Table`.
    """
    try:
        features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    except (ValueError, KeyError, TypeError):
        features = {}
    values = []
    for column in table.column_names:
        feature = features.get(column)
        is_class = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        names = feature.get("names") or [] if is_class else []
        of_rows = table.column(column).to_pylist()  # -1 and null of a row without a label stay as they are
        is_name = (isinstance(value, int) and 0 <= value < len(names) for value in of_rows)
        values.append([names[value] if named else value for value, named in zip(of_rows, is_name, strict=True)])
    rows = list(zip(*values, strict=True))
    numbers = range(first, first + len(rows))
    return Table(name, path, ".jsonl", table.column_names, rows, numbers, place=place, **options)


def of_dataset(dataset: Any) -> Any:
    """Return the rows of a data set, or of a stream of one, as a pyarrow table with the names of its classes."""
    import pyarrow

    found, features = dataset.with_format("arrow"), dataset.features
    if hasattr(found, "__len__"):
        table = found[:]
    else:
        table = pyarrow.concat_tables([*found.iter(batch_size=100)] or [pyarrow.table({})])
    return table if features is None else table.replace_schema_metadata(features.arrow_schema.metadata)
