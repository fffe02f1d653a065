"""A comparison on the terminal, and what is written to the file that an option names: completely or not at all."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mezo_cli.console import TextTable, plain_text
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.runs.atomic import write_error, write_file

if TYPE_CHECKING:  # `mezo predict` checks its --out here too
    import pandas as pd

FORMATS = (".csv",)  # of a comparison
SHORT = 14  # a column of texts up to this width is never folded


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs: tables and notes to read, records of groups, numbers or runs for CSV, a document (JSON)."""

    tables: Sequence["pd.DataFrame"]
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = ()
    document: Mapping[str, Any] = field(default_factory=dict)


def make_table(title: str, rows: "Sequence[Mapping[str, str | None]] | pd.DataFrame", left: int = 1) -> "pd.DataFrame":
    """Return a table of texts, `-` where a row has none. The first `left` columns are words, the others numbers."""
    import pandas as pd

    table = pd.DataFrame(rows, dtype=object).fillna("-")
    table.attrs.update(title=title, left=left)
    return table


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables and, below them, the notes. In a narrow terminal long words are folded; numbers never."""
    for table in comparison.tables:
        if table.attrs["title"]:
            console.print(plain_text(table.attrs["title"]))
        text = TextTable(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        for number, name in enumerate(table):
            words = number < table.attrs["left"]
            folded = words and table.iloc[:, number].str.len().max() > SHORT
            text.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not folded)
        for row in table.to_numpy():
            text.add_row(*row)
        console.print(text, end="\n\n")
    for note in dict.fromkeys(comparison.notes):
        item = TextTable.grid(padding=(0, 1))  # a hanging indent
        item.add_row("-", note)
        console.print(item)


def check_output(path: Path, formats: Collection[str] = FORMATS, option: str = "--out") -> None:
    """Check that the file of an option can be written, before any run is read; `formats`: allowed extensions."""
    if path.suffix not in formats:
        near = did_you_mean(path.suffix, formats)
        raise UserError(f"{option} {path}: the file extension sets the format; allowed are {join(formats)}{near}")
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder, not a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if (path.parent / "run.json").exists():
        raise UserError(f"{option} {path}: {path.parent} is a run directory; choose another folder")


def write_output(path: Path, content: str | bytes, option: str = "--out") -> None:
    """Write the file that an option named, completely or not at all."""
    try:
        write_file(path, content)
    except OSError as error:
        raise write_error(f"{option} {path}", error) from error


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV. A text that a spreadsheet would run as a formula gets a `'` before it."""
    import pandas as pd

    return str(pd.DataFrame(records, dtype=object).map(_cell).to_csv(index=False))


def _cell(value: Any) -> Any:
    """Return a list or mapping as the text of one cell: `13 21`, `negative:4 positive:6`, sentences with semicolons."""
    if isinstance(value, Mapping):
        value = " ".join(f"{key}:{entry}" for key, entry in value.items())
    elif isinstance(value, list):
        value = ("; " if any(isinstance(entry, str) for entry in value) else " ").join(map(str, value))
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
