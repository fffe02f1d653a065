"""`mezo compare`: runs beside each other and beside the paper. Reads run directories; loads no model and no torch."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mezo_cli import terminal
from mezo_cli.compare import collect, groups, objectives, overview, papertable, sheet
from mezo_cli.errors import UserError, listed

OUTPUTS = Path("outputs")


def compare(folders: Sequence[Path], view: str, out: Path | None) -> None:
    """Print a view of the runs under `folders` (else outputs/), or write it to `out`.

    `view` is groups, seeds (groups, and what was picked for each data seed), paper, or objectives.

    Raises:
        UserError: for a folder that is not there, no runs, a file that cannot be written.
    """
    if out is not None:
        sheet.check_out(out)
    if not folders and not OUTPUTS.is_dir() and view != "paper":
        raise UserError(f"no runs: there is no folder {OUTPUTS}/ here; name the folders of your runs")
    looked = folders or [folder for folder in (OUTPUTS,) if folder.is_dir()]
    entries, warnings = collect.collect(looked)
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr)
    if not entries and view != "paper":
        raise UserError(f"no runs under {listed(map(str, looked))}{' that can be read' if warnings else ''}")
    console = terminal.make_console()
    width = console.width if out is None else 1000
    if view == "objectives":
        made = objectives.objectives(entries, width)
    elif view == "paper":
        made = papertable.paper_table(groups.gather(entries), width)
    else:
        made = overview.overview(groups.gather(entries), seeds=view == "seeds")
    if out is None:
        sheet.show(made, console)
    else:
        sheet.write(made, out)
        print(f"wrote {out}")
