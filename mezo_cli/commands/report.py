"""`mezo report`: write a page about runs, or one figure for a paper."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mezo_cli.commands.open_run import folders_or_outputs
from mezo_cli.console import make_console, print_line, print_warning, progress_bar
from mezo_cli.errors import UserError
from mezo_cli.report.figures import FORMATS, paper_figure
from mezo_cli.report.page import read_report, render
from mezo_cli.runs.atomic import check_output, write_output


def report(folders: Sequence[Path], out: Path | None, figure: Path | None) -> None:
    """Report on the runs under `folders` (outputs/ if none is given): a page at `out`, a figure at `figure`."""
    if out is None and figure is None:
        raise UserError("mezo report: give --out FILE.html for a page, or --figure FILE.svg (.pdf, .png) for a figure")
    if out is not None:
        check_output(out, (".html",))
    if figure is not None:
        check_output(figure, FORMATS, "--figure")
    progress = partial(progress_bar, make_console())
    runs = read_report(folders_or_outputs(folders), progress)
    for text in runs.warnings:
        print_warning(text)
    if figure is not None:  # first: there may be nothing to draw, and then nothing is written
        paper_figure(runs.panels, figure)
        print_line(f"wrote {figure}")
    if out is not None:
        write_output(out, render(runs, progress))
        print_line(f"wrote {out}")
