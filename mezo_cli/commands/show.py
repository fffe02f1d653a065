"""`mezo show`: what one run was, its result and how it went, on the terminal or as JSON."""

import json
from pathlib import Path

from mezo_cli.console import make_console, print_line
from mezo_cli.report.document import document
from mezo_cli.report.entries import read_entry
from mezo_cli.report.terminal import show_document
from mezo_cli.runs import Run


def show(run: Path, as_json: bool) -> None:
    """Show the run in the directory `run`. It may be running."""
    found = document(read_entry(Run.open(run)))
    if as_json:
        print_line(json.dumps(found, indent=2, allow_nan=False))
    else:
        show_document(found, make_console())
