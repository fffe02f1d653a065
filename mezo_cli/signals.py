"""A polite kill (SIGTERM) counts as Ctrl-C, so that whatever is stopped can say how it ended."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any, NoReturn


def interrupt(*_: Any) -> NoReturn:
    """Take a signal as Ctrl-C."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C while the block runs; outside the main thread the caller's handlers stay."""
    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
