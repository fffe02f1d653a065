"""Read runs, and write a page or a figure about them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from mezo_cli.errors import UserError, join
from mezo_cli.report import figures, page
from mezo_cli.report.aggregate import Group, group_runs
from mezo_cli.report.curves import Panel, panels
from mezo_cli.report.details import RunDetails, read_details
from mezo_cli.report.read import read_runs
from mezo_cli.report.render import write_output
from mezo_cli.report.searches import Search, read_searches

# Called with what is done and the number of runs; inside the block the function is called with how many are done.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Report:
    """What is reported: the runs, oldest first, the groups that they form, their curves, the searches that they
    are trials of, and what was left out."""

    runs: Sequence[RunDetails]
    groups: Sequence[Group]
    panels: Sequence[Panel]
    searches: Sequence[Search]
    warnings: Sequence[str]

    def write_page(self, path: Path, progress: Progress) -> None:
        """Write the page, completely or not at all. `progress` shows how many runs are drawn.

        Raises:
            UserError: when the file cannot be written.
        """
        with progress("runs drawn", len(self.runs)) as done:
            text = page.render(self.runs, self.groups, self.panels, self.searches, self.warnings, done)
        write_output(path, text)

    def write_figure(self, path: Path) -> None:
        """Write one figure for a paper, completely or not at all.

        Raises:
            UserError: when there is nothing to draw, or the file cannot be written.
        """
        figures.paper_figure(self.runs, self.panels, path)


def read_report(folders: Sequence[Path], progress: Progress) -> Report:
    """Read all runs under `folders`, at any depth.

    Raises:
        UserError: for a folder that does not exist, and if there are no runs that can be read.
    """
    entries, warnings = read_runs(folders)
    runs = []
    with progress("runs read", len(entries)) as done:
        for number, entry in enumerate(entries):
            try:
                runs.append(read_details(entry))
            except (UserError, OSError) as error:
                warnings.append(f"{entry.location} is left out: {' '.join(str(error).split())}")
            done(number + 1)
    if not runs:
        why = f": {warnings[0]}" if warnings else ""
        raise UserError(f"no runs under {join(map(str, folders))}{' that can be read' if warnings else ''}{why}")
    groups = group_runs(run.entry for run in runs)
    searches = read_searches([run.entry for run in runs], warnings.append)
    return Report(runs, groups, panels(groups, {run.name: run for run in runs}), searches, warnings)
