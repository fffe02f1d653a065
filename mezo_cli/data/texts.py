"""Read rows to predict, which have no labels and no answers: words of a command line, lines, files, rows in memory."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.data.files import SUFFIXES, read_table, records_table
from mezo_cli.data.memory import table_of
from mezo_cli.data.table import LINE, Table, task_rows
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.tasks.template import row_texts


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
    return list(task.columns) if task.labels else row_texts(task).prompt_columns


def _typed(text: str, task: TaskConfig) -> Any:
    if not task.labels and text.lstrip()[:1] in ("[", "{"):  # a list or a record
        with suppress(ValueError):
            return json.loads(text)
    return text
