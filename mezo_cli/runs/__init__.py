"""Run directories: append-only logs, and files that are replaced as a whole; detect damage, find runs."""

from mezo_cli.runs.run import BEFORE_TRAINING, ReadOnlyRun, Run, find_runs

__all__ = ["BEFORE_TRAINING", "ReadOnlyRun", "Run", "find_runs"]
