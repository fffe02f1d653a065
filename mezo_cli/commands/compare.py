"""`mezo compare`: print a comparison of runs, or write it to a file."""

import json
from collections.abc import Sequence
from pathlib import Path

from mezo_cli.commands.open_run import OUTPUTS, folders_or_outputs
from mezo_cli.console import log, make_console, print_line, print_warning, training_output
from mezo_cli.errors import UserError
from mezo_cli.report.paper import find_table
from mezo_cli.report.tables import comparison, csv_text, show
from mezo_cli.runs.atomic import check_output, write_output


def compare(folders: Sequence[Path], table: str | None, out: Path | None, as_json: bool) -> None:
    """Compare the runs under `folders` (outputs/ if none is given), in one of the paper's tables if it is named."""
    if as_json and out is not None:
        raise UserError(f"--json and --out {out}: a document is printed or written, not both")
    if table is not None:
        find_table(table)  # an unknown name is refused before any run is read
    if out is not None:
        check_output(out)
    only_paper = table is not None and not folders and not OUTPUTS.is_dir()  # its numbers can be shown without runs
    console = make_console()
    width = 1000 if as_json or out is not None else console.width
    runs = comparison([] if only_paper else folders_or_outputs(folders), width, print_warning, table)
    if as_json:
        print_line(json.dumps(runs.document, indent=2, allow_nan=False))
    elif out is None:
        show(runs, console)
    else:
        write_output(out, csv_text(runs.records))
        print_line(f"wrote {out}")


def show_folder(folder: Path) -> None:
    """Show the comparison of the runs under a folder, at the end of a sweep or search, which names what is damaged."""
    log.info("")
    with training_output(False) as console:
        show(comparison([folder], console.width, lambda text: None), console)
