"""What a logger receives about its run, and the interface that it has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

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

    def was_logged(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Return whether the loggers had the scalars of a step before the run was resumed."""
        return all(step <= self.logged.get(name.split("/")[0], -1) for name in scalars)


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
