"""`mezo compare`: print a comparison of runs, or write it to a file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mezo_cli import report
from mezo_cli.console import make_console, print_line
from mezo_cli.errors import UserError

OUTPUTS = Path("outputs")


def compare(folders: Sequence[Path], view: str, out: Path | None) -> None:
    """Compare the runs under `folders` (outputs/ if none is given). `view` is one of `report.VIEWS`.

    Raises:
        UserError: for a folder that does not exist, no runs, a file that cannot be written.
    """
    if out is not None:
        report.check_output(out)
    if not folders and not OUTPUTS.is_dir() and view != "paper":
        raise UserError(f"no runs: there is no folder {OUTPUTS}/ here; name the folders of your runs")
    searched = folders or [folder for folder in (OUTPUTS,) if folder.is_dir()]
    console = make_console()
    width = console.width if out is None else 1000
    found = report.comparison(searched, view, width, warn=_warn)
    if out is None:
        report.show(found, console)
    else:
        report.write(found, out)
        print_line(f"wrote {out}")


def _warn(text: str) -> None:
    print_line(f"warning: {text}", sys.stderr)
