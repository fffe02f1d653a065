"""The run directory as ranks other than 0 see it: they read what rank 0 has written, and write nothing."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mezo_cli.errors import UserError
from mezo_cli.runs.run import Run
from mezo_cli.system import termination_as_keyboard_interrupt


class ReadOnlyRun(Run):
    """A run that another process has claimed and writes; see `Run` for the methods."""

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

    def open_trajectory(self, keep: int = 0) -> BinaryIO:
        """Open a file that discards what is written."""
        return open(os.devnull, "r+b")

    def _write_nothing(self, *_: Any, **__: Any) -> None:
        """Write nothing, in place of what writes a file of the run."""

    update = log_metrics = log_completions = sync_metrics = truncate_metrics = _write_nothing
    save_initial_state = save_checkpoint = write_summary = write_values = write_predictions = _write_nothing
