"""Compare runs with each other and with the paper's numbers. Needs run directories only: no model and no torch."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from mezo_cli.errors import UserError, join
from mezo_cli.report.aggregate import group_runs
from mezo_cli.report.read import read_runs
from mezo_cli.report.render import Comparison, check_output, show, write
from mezo_cli.report.views import group_view, objective_view, paper_view

__all__ = ["VIEWS", "Comparison", "check_output", "comparison", "show", "write"]

log = logging.getLogger(__name__)

VIEWS = ("groups", "seeds", "paper", "objectives")


def comparison(
    folders: Sequence[Path], view: str = "groups", width: int = 1000, warn: Callable[[str], None] = log.warning
) -> Comparison:
    """Return a comparison of all runs under `folders`, for `show` or `write`.

    Args:
        folders: where to look for run directories, at any depth.
        view: `groups` (mean and std over data seeds), `seeds` (also the picked point of each data seed), `paper` (the
            paper's whole table with the runs' results), or `objectives` (one column per run).
        width: characters per line that a table may take; some views split a table that is wider.
        warn: called for each directory that cannot be read as a run.

    Raises:
        UserError: for a folder that does not exist, and if there are no runs (the view `paper` needs none).
    """
    entries, warnings = read_runs(folders)
    for text in warnings:
        warn(text)
    if view == "paper":
        return paper_view(group_runs(entries), width)
    if not entries:
        raise UserError(f"no runs under {join(map(str, folders))}{' that can be read' if warnings else ''}")
    if view == "objectives":
        return objective_view(entries, width)
    return group_view(group_runs(entries), seeds=view == "seeds")
