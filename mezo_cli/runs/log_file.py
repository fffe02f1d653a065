"""`train.log`: the log of a run."""

import contextlib
import logging
from pathlib import Path

from mezo_cli.console import LogFormatter
from mezo_cli.errors import UserError
from mezo_cli.runs.files import open_own


class LogFile(logging.Handler):
    """Append the log to a file, opened for each line. A line that cannot be written does not stop a run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(LogFormatter("%(asctime)s %(levelname)-7s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line."""
        with contextlib.suppress(OSError, UserError), open_own(self._path, "ab") as file:
            file.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))
