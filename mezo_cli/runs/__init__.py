"""The run directory: what a run leaves, how damage to it shows, and how runs are found again."""

from mezo_cli.runs.run import STATUSES, Run, find

__all__ = ["STATUSES", "Run", "find"]
