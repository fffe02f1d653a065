"""Loggers: where a run's scalars go besides metrics.jsonl. A logger is one module here and one row of `LOGGERS`."""

from mezo_cli.config.registry import LOGGERS
