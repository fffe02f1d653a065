"""The interface of a logger, what it receives about its run, and the loggers of a run that is being trained.

One that raises is dropped with a warning; training continues.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from mezo_cli.config.registry import LOGGERS
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.config.validation import check_installed
from mezo_cli.console import log
from mezo_cli.errors import one_line, without_credentials
from mezo_cli.runs import Run

Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class LoggedRun:
    """A run as its loggers see it: plain values.

    Attributes:
        id: stays the same when the run is resumed, or its directory is moved.
        name: the name of the run directory when the run began.
        folder: the logger's own folder, RUN/NAME; it exists.
        project: `logger.project`.
        tags: what the run is (task, objective, optimizer, ...), and the user's `logger.tags`.
        config: the config as nested plain values.
        resumed_at: the step that a resumed run continues from; None for a new run.
        logged: of a resumed run: `train` and `dev` -> the last step whose scalars the loggers had before.
    """

    id: str
    name: str
    folder: str
    project: str
    tags: list[str]
    config: dict[str, Any]
    resumed_at: int | None = None
    logged: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        status: as in run.json.
        step: steps done.
        error: of a run that failed or was interrupted: why.
        summary: of a finished run: the numbers of summary.json, `final/test_accuracy` and the like.
    """

    status: Status
    step: int
    error: str | None = None
    summary: Mapping[str, float] = field(default_factory=dict)


class Logger(Protocol):
    """A destination for scalars. It writes only to its own folder. Whatever it raises, training continues without it.

    It is called by the process that trains, between two steps, so it should neither print nor wait for long.

    Attributes:
        package: the package that it needs, as it is imported and installed.
        note: a line for the log once it has started; empty for none.
    """

    package: ClassVar[str]
    note: str

    def __init__(self, run: LoggedRun) -> None: ...

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of a step; the names are `train/loss`, `dev/accuracy`, ..."""

    def close(self, end: RunEnd) -> None:
        """Record how the run ended, flush and close."""


@dataclass
class RunLoggers:
    """The loggers that the config names.

    metrics.jsonl has the same scalars, so a logger is never a reason to stop: what one of them raises is logged once as
    a warning, and that logger gets nothing more.
    """

    config: Config
    run: Run
    _loggers: dict[str, Logger] = field(default_factory=dict)

    def open(self, resumed_at: int | None = None, logged: Mapping[str, int] | None = None) -> None:
        """Start the loggers; see `LoggedRun` for `resumed_at` and `logged`."""
        for name in self.config.logger.names if self.run.writes else ():
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
        run, config = self.run, self.config
        folder, identity = run.path / name, run.info().get("logged_as")
        folder.mkdir(exist_ok=True)
        if identity is None:  # stored at the first start
            identity = {"id": uuid.uuid4().hex[:16], "name": run.path.name}
            run.update(logged_as=identity)
        choices = (config.task, config.objective, config.optimizer, config.peft, config.model, config.data)
        what = [Path(choice.name).name for choice in choices if choice.name != "none"]
        tags = list(dict.fromkeys([*what, *config.logger.tags]))
        about: dict[str, Any] = {"project": config.logger.project, "tags": tags, "config": to_dict(config)}
        about |= {"folder": str(folder), "resumed_at": resumed_at, "logged": dict(logged)}
        logger: Logger = LOGGERS.load(name)(LoggedRun(**identity, **about))
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
