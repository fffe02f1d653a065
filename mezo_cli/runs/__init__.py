"""Run directories: create, lock, read and write their files, detect damage, find runs."""

from mezo_cli.runs.find import find_runs
from mezo_cli.runs.run import Run
from mezo_cli.runs.run_json import STATUSES

__all__ = ["STATUSES", "Run", "find_runs"]
