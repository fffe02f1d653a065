"""What the user sees of a run: the log above a live bar on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

log = logging.getLogger("mezo")


class Meter:
    """What the user sees while a run goes: a live bar on a terminal, plain lines otherwise."""

    EVERY = 30.0  # seconds between plain lines, at the longest

    def __init__(self, progress: Progress | None, total: int, done: int) -> None:
        self._progress, self._total, self._first = progress, total, done
        self._began: float | None = None
        self._told = time.perf_counter()
        self._fields: dict[str, Any] = {"loss": "-", "dev": "-", "rate": "-"}
        if progress is not None:
            self._task = progress.add_task("train", total=total, completed=done, **self._fields)

    def step(self, done: int, loss: float) -> None:
        """Show the loss of step number `done`: in the bar, and in the log each twentieth of the way or half minute."""
        now = time.perf_counter()
        if self._began is None:  # the first step compiles, and says nothing about the others
            self._first, self._began = done, now
        rate = (done - self._first) / max(now - self._began, 1e-9)
        speed = f"{rate:.2f}" if rate < 10 else f"{rate:.1f}"
        self._fields.update(loss=f"{loss:.4f}", rate=speed if rate else "-")
        if self._progress is not None:
            self._progress.update(self._task, completed=done, **self._fields)
        if done % max(1, self._total // 20) == 0 or now - self._told > self.EVERY:
            self._told = now
            left = f"  {speed} steps/s  {duration((self._total - done) / rate)} left" if rate else ""
            log.debug("%s  loss %.4f%s", self._at(done), loss, left)

    def dev(self, step: int, accuracy: float, told: str) -> None:
        """Tell an evaluation on dev: its accuracy in the bar, all of it in the log."""
        self._fields["dev"] = f"{100 * accuracy:.1f}%"
        if self._progress is not None:
            self._progress.update(self._task, **self._fields)
        log.info("%s  dev %s", self._at(step), told)

    def _at(self, step: int) -> str:
        return f"step {step:{len(str(self._total))}d}/{self._total}"


@contextmanager
def meter(console: Console, total: int, done: int) -> Iterator[Meter]:
    """Open the meter of a run of `total` steps of which `done` are done."""
    if not console.is_terminal or total == 0:
        yield Meter(None, total, done)
        return
    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss [cyan]{task.fields[loss]}[/]"),
        TextColumn("dev [green]{task.fields[dev]}[/]"),
        TextColumn("{task.fields[rate]} steps/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4, expand=True) as progress:
        yield Meter(progress, total, done)


def make_console() -> Console:
    """Return the terminal; what is no terminal (a pipe, a file) has lines of any length, so that none is folded."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def table(first: str, *columns: str) -> Table:
    """Return an empty table without rules: a left-aligned first column, numbers to the right of it."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(first, overflow="fold")
    for column in columns:
        made.add_column(column, justify="right")
    return made


class _Lines(logging.StreamHandler):
    """Plain lines. A reader that went away (`| head`, a lost connection) does not stop a run; train.log has it all."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own spelling)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def telling(console: Console) -> Iterator[None]:
    """Send the log to the console while the block runs: above the bar on a terminal, as plain lines otherwise.

    The logger is left as it was found: the block may be a call out of someone else's program.
    """
    handler: logging.Handler = _Lines(console.file)
    handler.setLevel(logging.DEBUG)
    if console.is_terminal:
        plain = NullHighlighter()
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False, highlighter=plain)
        handler.setLevel(logging.INFO)  # the steps are in the bar
    handler.setFormatter(logging.Formatter("%(message)s"))
    kept = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(kept[0])
        log.propagate = kept[1]


def duration(seconds: float) -> str:
    """Return a time in the two units that matter: 12 s, 3 min, 2 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
