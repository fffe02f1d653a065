"""Standard streams that are closed or gone, and what libraries log."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

from mezo_cli.errors import without_credentials


def prepare_standard_streams() -> None:
    """Open the standard streams that the process was started without, and let every character be printed.

    Else the next file to be opened would get the descriptor of a closed stream, and what C libraries print. A
    character that the encoding of the output lacks (the locale C) becomes an escape: `\\xe9`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each opens the lowest free descriptor
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 (it stays open)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_output(stream: IO[str]) -> None:
    """Discard what is written to a stream from now on, and what it has buffered: its reader or its terminal is gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def logs_without_credentials() -> Iterator[None]:
    """Cut credentials from every log record made inside the block: libraries log the addresses that they ask."""
    before = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        with contextlib.suppress(Exception):  # a record that cannot be formatted is its handler's to report
            record.msg, record.args = without_credentials(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)
