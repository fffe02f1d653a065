"""The loggers of a run that is being trained. One that raises is dropped with a warning; training continues."""

import logging
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mezo_cli.config.rules import check_installed
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.errors import one_line, without_credentials
from mezo_cli.runs import Run
from mezo_cli.training.loggers import LOGGERS
from mezo_cli.training.loggers.base import LoggedRun, Logger, RunEnd

log = logging.getLogger("mezo")


class RunLoggers:
    """The loggers that the config names.

    metrics.jsonl has the same scalars, so a logger is never a reason to stop: what one of them raises is logged once as
    a warning, and that logger gets nothing more.
    """

    def __init__(self, config: Config, run: Run) -> None:
        self._config, self._run = config, run
        self._loggers: dict[str, Logger] = {}

    def open(self, resumed_at: int | None = None, logged: Mapping[str, int] | None = None) -> None:
        """Start the loggers; see `LoggedRun` for `resumed_at` and `logged`."""
        for name in self._config.logger.names if self._run.writes else ():
            self._guard(name, resumed_at or 0, partial(self._start, name, resumed_at, logged or {}))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Give the scalars of a step to every logger."""
        for name, logger in list(self._loggers.items()):
            self._guard(name, step, partial(logger.log, step, scalars))

    def close(self, end: RunEnd) -> None:
        """Report to every logger how the run ended, and close it."""
        for name, logger in list(self._loggers.items()):
            self._guard(name, end.step, partial(logger.close, end))
        self._loggers.clear()

    def _start(self, name: str, resumed_at: int | None, logged: Mapping[str, int]) -> None:
        check_installed([name])
        run, config = self._run, self._config
        folder, identity = run.make_logger_folder(name), run.info().get("logged_as")
        if identity is None:  # stored at the first start
            identity = {"id": uuid.uuid4().hex[:16], "name": run.path.name}
            run.update(logged_as=identity)
        logger: Logger = LOGGERS.load(name)(
            LoggedRun(
                **identity,
                folder=str(folder),
                project=config.logger.project,
                tags=_tags(config),
                config=to_dict(config),
                resumed_at=resumed_at,
                logged=dict(logged),
            )
        )
        self._loggers[name] = logger
        if logger.note:
            log.info("%-6s %s", name, without_credentials(logger.note))

    def _guard(self, name: str, step: int, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # of any package
            self._loggers.pop(name, None)
            reason = without_credentials(one_line(error))
            log.warning("warning: logger=%s is left out from step %d on: %s", name, step, reason)


def final_scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary.json for loggers: `final/test_accuracy`, `final/seconds`."""
    scalars: dict[str, float] = {}
    for key, value in summary.items():
        for name, number in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(number, (int, float)):
                scalars["final/" + "_".join(part for part in (key, name) if part)] = float(number)
    return scalars


def _tags(config: Config) -> list[str]:
    """Return what a run is, in words to filter by, and the user's own tags."""
    choices = (config.task, config.objective, config.optimizer, config.peft, config.model, config.data)
    names = [Path(choice.name).name for choice in choices if choice.name != "none"]
    return list(dict.fromkeys([*names, *config.logger.tags]))
