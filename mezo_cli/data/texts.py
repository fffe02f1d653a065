"""Read rows that no data source has: those of a Python program, those to predict, and those of `data.keep`.

`finetune` and `load(...).predict` take rows in the forms that a program may have them in: a list (or a generator) of
rows, a `datasets.Dataset`, a DataFrame of pandas, or columns, a mapping of lists. What looks like them, one row, one
text or a mapping of splits, is refused by name. `mezo predict` takes words of a command line, lines and files. Rows to
predict have no labels and no answers.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Config, Example, TaskConfig
from mezo_cli.data.files import SUFFIXES, arrow_table, of_dataset, read_table, records_table
from mezo_cli.data.table import ITEM, LINE, Table, read_columns, task_rows
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.tasks.generate import GenerateEncoder, PromptRow

Rows = Iterable[Any] | Mapping[str, Sequence[Any]]
FILES = {"train": "train_dataset", "test": "eval_dataset"}  # split, of which a run stores the rows -> its argument
MOST_BYTES = 4e9  # of the log-probabilities that the start of a run gives the answers of `data.keep`
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


# --- rows to predict ---


def from_words(words: Sequence[str], task: TaskConfig) -> list[Example]:
    """Return the rows that `--text` gives: `TEXT`, or `COLUMN=TEXT` for each column of a task of several.

    For a task without labels a list or a record is written as JSON: `numbers=[3,5,7]`.
    """
    columns = prompt_columns(task)
    shape = " ".join(f"--text {column}=..." for column in columns)
    rows: list[dict[str, Any]] = []
    row: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if len(columns) == 1 and name != columns[0]:
            name, text = columns[0], word
        if name not in columns or name in row or not text.strip():
            near = did_you_mean(name, columns) if equals and name not in columns else ""
            why = "needs a text for each, once per row" if len(columns) > 1 else "needs a text"
            raise UserError(f"--text {word[:40]!r}{near}: task '{task.name}' reads {join(columns)}, and {why}: {shape}")
        row[name] = _typed(text, task)
        if len(row) == len(columns):
            rows.append(row)
            row = {}
    if row:
        missing = join(column for column in columns if column not in row)
        raise UserError(f"--text: the last row lacks {missing}; each row is {shape}")
    return _to_predict(records_table("--text", "--text", rows, range(1, len(rows) + 1), "{} {}"), without_answers(task))


def from_lines(lines: Iterable[bytes], where: str, task: TaskConfig) -> Iterator[Example]:
    """Yield a row per line as the lines come; fields of a task of several columns are separated by tabs.

    Lines without text are skipped.
    """
    columns, task = prompt_columns(task), without_answers(task)
    for number, raw in enumerate(lines, 1):
        location = f"{where}:{number}"
        try:
            line = raw.decode("utf-8").rstrip("\r\n").removeprefix("\ufeff" if number == 1 else "")
        except UnicodeDecodeError as error:
            raise UserError(f"{location}: byte 0x{raw[error.start]:02x} is not UTF-8 ({error.reason})") from None
        if not line.strip():
            continue
        fields = [line] if len(columns) == 1 else line.split("\t")
        if len(fields) != len(columns):
            shown = f"{len(fields)} field{'s' * (len(fields) != 1)}"
            raise UserError(f"{location}: {shown}, expected {len(columns)} ({join(columns)}), separated by tabs")
        record = {column: _typed(field, task) for column, field in zip(columns, fields, strict=True)}
        yield from _to_predict(records_table(where, where, [record], [number], LINE), task)


def from_file(path: Path, task: TaskConfig) -> list[Example]:
    """Return the rows of a JSONL, JSON, CSV, TSV or Parquet file.

    Columns that the task does not read are ignored, or kept with the row if it is a task without labels.
    """
    if path.suffix not in SUFFIXES:
        near = did_you_mean(path.suffix, SUFFIXES)
        raise UserError(f"{path}: the file extension sets the format; allowed are {join(SUFFIXES)}{near}")
    if not path.is_file():
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file{did_you_mean(path.name, siblings)}")
    task = without_answers(task)
    return _to_predict(read_table([path], task), task)


def from_memory(rows: Any, task: TaskConfig) -> list[Example]:
    """Return rows in memory, each also as a text, or as a sequence in the order of the columns."""
    table = table_of("rows", rows, task, prompt_columns(task), nameless=True)
    return _to_predict(table, without_answers(task)) if table.rows else []


def _to_predict(table: Table, task: TaskConfig) -> list[Example]:
    if not task.labels:  # the task is one `without_answers`
        return task_rows(table, task).examples()
    columns = table.find_columns(task.columns, task)
    return [Example(table.texts(i, columns), 0, table.location(i)) for i in range(len(table.rows))]


def without_answers(task: TaskConfig) -> TaskConfig:
    """Return the task as the rows to predict are read: neither label nor answer is one of their columns."""
    if task.labels:
        return task.replace(label_column=task.columns[0])
    return task.replace(generate=task.generate.replace(answer=None, gold=None), choice=task.choice.replace(right=None))


def prompt_columns(task: TaskConfig) -> list[str]:
    """Return the columns that a row to predict has, in order."""
    return list(task.columns) if task.labels else read_columns(without_answers(task))


def _typed(text: str, task: TaskConfig) -> Any:
    if not task.labels and text.lstrip()[:1] in ("[", "{"):  # a list or a record
        with suppress(ValueError):
            return json.loads(text)
    return text


# --- the rows of `data.keep` ---


def read_kept_rows(config: Config, file: Path, tokenizer: Any) -> list[PromptRow]:
    """Return the rows of `data.keep`, encoded as the task's prompts are."""
    settings = config.task.generate.replace(prompt="{prompt}", answer="{answer}", gold=None)
    task = config.task.replace(labels=[], columns=[], rename={}, generate=settings)
    try:
        examples = task_rows(read_table([file], task), task).examples()
        rows = GenerateEncoder(task, tokenizer).encode_all(examples)
    except UserError as error:
        raise UserError(f"data.keep: {error}") from error
    tokens, words = sum(len(row.answer_ids) for row in rows), len(tokenizer)
    if 4 * tokens * words > MOST_BYTES:
        why = f"{tokens:,} tokens of answers times {words:,} words take {4 * tokens * words / 1e9:.3g} GB"
        raise UserError(f"data.keep={file}: {why}, and {MOST_BYTES / 1e9:g} GB are the limit; give fewer rows")
    return rows
