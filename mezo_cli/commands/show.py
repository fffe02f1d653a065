"""`mezo show`: what one run was, its result and how it went, on the terminal or as JSON."""

import json
from pathlib import Path

from mezo_cli.console import make_console, print_line
from mezo_cli.report.details import read_details
from mezo_cli.report.read import read_run
from mezo_cli.report.terminal import document, show_details, show_result


def show(run: Path, as_json: bool, quiet: bool = False) -> None:
    """Show the run in the directory `run`, or, if `quiet`, its warnings and its result only. It may be running."""
    details = read_details(read_run(run))
    if as_json:
        print_line(json.dumps(document(details), indent=2, allow_nan=False))
    elif quiet:
        show_result(details, make_console())
    else:
        show_details(details, make_console())
