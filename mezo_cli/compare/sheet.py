"""What a comparison shows, and its ways out: the terminal, Markdown, CSV, JSON."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mezo_cli.errors import UserError, did_you_mean, listed
from mezo_cli.runs import sealed

SHORT = 14  # characters of a cell that is never folded


@dataclass(frozen=True)
class Sheet:
    """A table: the first `left` columns are words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True)
class View:
    """A comparison: tables and notes for the eye, flat records for CSV, a document for JSON."""

    sheets: Sequence[Sheet]
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = ()
    document: Mapping[str, Any] = field(default_factory=dict)


def show(view: View, console: Console) -> None:
    """Print the tables and, below them, the notes."""
    for sheet in view.sheets:
        if sheet.title:
            console.print(sheet.title, markup=False, highlight=False)
        console.print(_table(sheet), markup=False, highlight=False)
        console.print()
    for note in view.notes:
        hung = Table.grid(padding=(0, 1))
        hung.add_row("-", note)
        console.print(hung, markup=False, highlight=False)


def _table(sheet: Sheet) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for number, name in enumerate(sheet.columns):
        words = number < sheet.left
        widest = max((len(line) for row in sheet.rows for line in row[number].split("\n")), default=0)
        # Long words give way where the terminal is narrow; numbers and short words never.
        made.add_column(
            name, justify="left" if words else "right", overflow="fold", no_wrap=not words or widest <= SHORT
        )
    for row in sheet.rows:
        made.add_row(*row)
    return made


# --- files ---


def check_out(out: Path) -> None:
    """Refuse a file that could not be written, before anything is read for it.

    Raises:
        UserError: for an unknown ending, a folder that is not there, a place inside a run.
    """
    if out.suffix not in WRITERS:
        near = did_you_mean(out.suffix, WRITERS)
        raise UserError(f"--out {out}: the ending says the format; allowed are {listed(WRITERS)}{near}")
    if out.is_dir():
        raise UserError(f"--out {out}: this is a folder; a file is wanted")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    if (out.parent / "run.json").exists():
        raise UserError(f"--out {out}: {out.parent} is a run directory; choose another place")


def write(view: View, out: Path) -> None:
    """Write a view as its file's ending says, whole or not at all."""
    try:
        sealed.write_whole(out, WRITERS[out.suffix](view))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error


def _markdown(view: View) -> str:
    parts = []
    for sheet in view.sheets:
        rules = ["---" if number < sheet.left else "---:" for number in range(len(sheet.columns))]
        lines = [_row(sheet.columns), f"|{'|'.join(rules)}|", *map(_row, sheet.rows)]
        parts.append("\n".join(([f"**{_plain(sheet.title)}**", ""] if sheet.title else []) + lines))
    if view.notes:
        parts.append("\n".join(f"- {_plain(note)}" for note in view.notes))
    return "\n\n".join(parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Return a text with nothing in it that Markdown would take for its own."""
    for mark in ("\\", "|", "*", "_", "<", "[", "`"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def _csv(view: View) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for record in view.records for key in record)))
    writer.writeheader()
    writer.writerows(view.records)
    return file.getvalue()


def _json(view: View) -> str:
    return json.dumps(view.document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS = {".md": _markdown, ".csv": _csv, ".json": _json}
