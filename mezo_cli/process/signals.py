"""Signals that end this process, and slow imports, which they must not interrupt."""

import contextlib
import importlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from mezo_cli.errors import UserError, one_line

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signal_handlers(signals: Iterable[signal.Signals], handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Handle signals by `handler` inside the block, except those that are ignored, as SIGHUP is under nohup.

    Outside the main thread, where handlers cannot be set, they stay.
    """
    before: dict[signal.Signals, Any] = {}
    for number in signals if threading.current_thread() is threading.main_thread() else ():
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# Treats SIGTERM and SIGHUP like Ctrl-C inside the block, so that an interrupted run records its status.
termination_as_keyboard_interrupt = partial(signal_handlers, ENDING_SIGNALS[1:], signal.default_int_handler)


def import_torch() -> None:
    """Import torch, before any module that imports it; an ending signal meanwhile is acted on when that is done.

    An exception during the initialization of torch's C++ libraries would abort the process.
    """
    came: list[int] = []
    with signal_handlers(ENDING_SIGNALS, lambda number, _: came.append(number)):
        try:
            import torch  # noqa: F401
        except (ImportError, OSError, MemoryError) as error:  # little memory, a broken installation
            raise UserError(f"torch cannot be imported: {one_line(error)}") from error
    if came:
        raise KeyboardInterrupt


def import_libraries() -> None:
    """Import what a run imports late, and takes long."""
    for name in ("peft", "scipy.stats", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"):
        importlib.import_module(name)
