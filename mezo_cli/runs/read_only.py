"""The run directory as ranks other than 0 see it: they read what rank 0 has written, and write nothing."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mezo_cli.errors import UserError
from mezo_cli.runs.run import Run
from mezo_cli.system import termination_as_keyboard_interrupt


class ReadOnlyRun(Run):
    """A run that another process has claimed and writes; see `Run` for the methods.

    Raises:
        UserError: when the directory is not there: it lies on a disk that this host does not share.
    """

    writes = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not (path / "config.yaml").is_file():
            raise UserError(
                f"{path}: this rank does not see the run directory; it must be on a disk that all hosts share"
            )

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Treat SIGTERM and SIGHUP as Ctrl-C inside the block."""
        with termination_as_keyboard_interrupt():
            yield

    def update(self, **fields: Any) -> None:
        """Write nothing."""

    def log_metrics(self, record_kind: str, step: int, **values: Any) -> None:
        """Write nothing."""

    def log_completions(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write nothing."""

    def sync_metrics(self) -> None:
        """Write nothing."""

    def truncate_metrics(self, step: int) -> None:
        """Write nothing."""

    def open_trajectory(self, keep: int = 0) -> BinaryIO:
        """Open a file that discards what is written."""
        return open(os.devnull, "r+b")

    def save_initial_state(self, write: Callable[[Path], None]) -> None:
        """Write nothing."""

    def save_checkpoint(self, name: str, step: int, write: Callable[[Path], None]) -> None:
        """Write nothing."""

    def write_summary(self, values: dict[str, Any]) -> None:
        """Write nothing."""

    def write_untrained(self, scores: Mapping[str, list[list[float]]]) -> None:
        """Write nothing."""

    def write_predictions(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write nothing."""
