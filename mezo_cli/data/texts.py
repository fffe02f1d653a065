"""Read rows to predict, which have no labels and no answers: words of a command line, lines, files, rows in memory."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.data.files import SUFFIXES, read_table
from mezo_cli.data.table import check_text, task_rows, unlabelled_row
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.tasks.template import row_texts


def from_words(words: Sequence[str], task: TaskConfig) -> list[Example]:
    """Return the rows that `--text` gives: `TEXT`, or `COLUMN=TEXT` for each column of a task of several.

    For a task without labels a list or a record is written as JSON: `numbers=[3,5,7]`.
    """
    columns = read_columns(task)
    shape = " ".join(f"--text {column}=..." for column in columns)
    rows: list[Example] = []
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
            rows.append(from_row(row, f"--text {len(rows) + 1}", task))
            row = {}
    if row:
        missing = join(column for column in columns if column not in row)
        raise UserError(f"--text: the last row lacks {missing}; each row is {shape}")
    return rows


def from_lines(lines: Iterable[bytes], where: str, task: TaskConfig) -> Iterator[Example]:
    """Yield a row per line as the lines come; fields of a task of several columns are separated by tabs.

    Lines without text are skipped.
    """
    columns = read_columns(task)
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
        yield from_row([_typed(field, task) for field in fields], location, task)


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
    if not task.labels:
        no_answer = task.generate.replace(answer=None, gold=None)
        prompts = task.replace(generate=no_answer, choice=task.choice.replace(right=None))
        return task_rows(read_table([path], prompts), prompts).examples()
    # A header is recognized by the columns that the task reads; here the label is not one of them.
    table = read_table([path], task.replace(label_column=task.columns[0]))
    columns = table.find_columns(task.columns, task)
    return [Example(table.texts(i, columns), 0, table.location(i)) for i in range(len(table.rows))]


def from_row(row: Any, where: str, task: TaskConfig) -> Example:
    """Return the row that a text, a mapping of columns, or a sequence of texts in the order of the columns gives.

    The columns are `task.columns`, or those of the prompt of a task without labels, whose rows keep all columns of a
    mapping and need not be texts.
    """
    columns = read_columns(task)
    if isinstance(row, str):
        if len(columns) != 1:
            raise UserError(f"{where}: one text, but task '{task.name}' reads {join(columns)}; give a mapping of them")
        texts: Sequence[Any] = [row]
    elif isinstance(row, Mapping):
        missing = [column for column in columns if column not in row]
        if missing:
            near = did_you_mean(missing[0], map(str, row))
            raise UserError(
                f"{where}: no column '{missing[0]}', which task '{task.name}' reads; the columns are: "
                f"{join(map(str, row))}{near}"
            )
        texts = [row[column] for column in columns]
    elif isinstance(row, Sequence) and len(row) == len(columns):
        texts = list(row)
    else:
        raise UserError(f"{where}: not a text, nor a mapping of {join(columns)}")
    if not task.labels:
        return unlabelled_row(row if isinstance(row, Mapping) else dict(zip(columns, texts, strict=True)), where)
    for column, text in zip(columns, texts, strict=True):
        check_text(text, where, column)
    return Example(tuple(texts), 0, where)


def _typed(text: str, task: TaskConfig) -> Any:
    """Return the list or the record that a text is the JSON of, for a task that reads such; else the text."""
    if not task.labels and text.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            return json.loads(text)
    return text


def read_columns(task: TaskConfig) -> list[str]:
    """Return the columns that a row to predict has, in order."""
    return list(task.columns) if task.labels else row_texts(task).prompt_columns
