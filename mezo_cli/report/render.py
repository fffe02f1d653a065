"""Write the tables of a comparison: on the terminal, or as a Markdown, CSV or JSON file."""

import csv
import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from mezo_cli.console import TextTable, plain_text, printable
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.runs import files, output

SHORT = 14  # a column of texts up to this width is never folded


@dataclass(frozen=True)
class Table:
    """A table: the first `left` columns are texts, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs: tables and notes to read, flat records for CSV, a document for JSON."""

    tables: Sequence[Table]
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = ()
    document: Mapping[str, Any] = field(default_factory=dict)


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables and, below them, the notes."""
    for table in comparison.tables:
        if table.title:
            console.print(plain_text(table.title))
        console.print(_text_table(table))
        console.print()
    for note in comparison.notes:
        item = TextTable.grid(padding=(0, 1))  # a hanging indent
        item.add_row("-", note)
        console.print(item)


def _text_table(table: Table) -> TextTable:
    made = TextTable(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for number, name in enumerate(table.columns):
        is_text = number < table.left
        widest = max((len(line) for row in table.rows for line in row[number].split("\n")), default=0)
        # In a narrow terminal long texts are folded; numbers and short texts never.
        made.add_column(
            name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text or widest <= SHORT
        )
    for row in table.rows:
        made.add_row(*row)
    return made


# --- files ---


def check_output(path: Path, formats: Collection[str] | None = None, option: str = "--out") -> None:
    """Check that a file can be written to `path`, before any run is read.

    Args:
        path: the file.
        formats: the file extensions that are allowed; those of a comparison if not given.
        option: the option that named it.

    Raises:
        UserError: for an unknown file extension, a folder that does not exist, a path inside a run directory.
    """
    allowed = WRITERS if formats is None else formats
    if path.suffix not in allowed:
        near = did_you_mean(path.suffix, allowed)
        raise UserError(f"{option} {path}: the file extension sets the format; allowed are {join(allowed)}{near}")
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder, not a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if (path.parent / "run.json").exists():
        raise UserError(f"{option} {path}: {path.parent} is a run directory; choose another folder")


def write(comparison: Comparison, path: Path) -> None:
    """Write a comparison in the format of the file's extension, completely or not at all.

    Raises:
        UserError: when the file cannot be written.
    """
    write_output(path, WRITERS[path.suffix](comparison))


def write_output(path: Path, content: str | bytes, option: str = "--out") -> None:
    """Write the file that an option named, completely or not at all.

    Raises:
        UserError: when the file cannot be written.
    """
    try:
        output.write_file(path, content)
    except OSError as error:
        raise files.write_error(f"{option} {path}", error) from error


def _markdown(comparison: Comparison) -> str:
    parts = []
    for table in comparison.tables:
        rules = ["---" if number < table.left else "---:" for number in range(len(table.columns))]
        lines = [_markdown_row(table.columns), f"|{'|'.join(rules)}|", *map(_markdown_row, table.rows)]
        parts.append("\n".join(([f"**{_escape(table.title)}**", ""] if table.title else []) + lines))
    if comparison.notes:
        parts.append("\n".join(f"- {_escape(note)}" for note in comparison.notes))
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    """Escape the characters that have a meaning in Markdown."""
    for mark in ("\\", "|", "*", "_", "<", "[", "`"):
        text = text.replace(mark, f"\\{mark}")
    return printable(" ".join(text.split()))


def _csv(comparison: Comparison) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for record in comparison.records for key in record)))
    writer.writeheader()
    writer.writerows(comparison.records)
    return file.getvalue()


def _json(comparison: Comparison) -> str:
    return json.dumps(comparison.document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS = {".md": _markdown, ".csv": _csv, ".json": _json}
