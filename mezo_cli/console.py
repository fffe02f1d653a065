"""Console output: logging, a progress bar on a terminal and plain lines elsewhere, tables.

Text from data, file names, labels and errors is not trusted: a terminal never gets its control characters, and rich
never reads it as markup. Everything is printed by `print_line`, a `TextTable` or the log, which see to that.
"""

import json
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mezo_cli.errors import without_credentials
from mezo_cli.process.environment import discard_output

log = logging.getLogger("mezo")

Describe = Callable[[], Mapping[str, Any]]  # returns a document
PROMPT_END = 60  # characters of a prompt that a line shows
STEP_LINE = "step %*d/%d  %s"
COMMAND = re.compile(r"(^next|:) +mezo \w")  # in a line that ends in a command
RATE_OVER = 300.0  # seconds over which a rate is taken: a machine may be busy for an hour
LATER, DAY = 600.0, 86_400.0  # seconds from which on the time of day of an end is told, and its day
LINE_EVERY = 30.0  # seconds between log lines about progress

_quiet = ContextVar("quiet", default=False)  # whether the command was asked for warnings and errors only

# Control characters (C0 without tab and line feed, DEL, C1), marks and overrides of the writing direction, line
# separators, and the surrogates by which Python represents bytes of a file name that are not UTF-8.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


# --- text ---


def printable(text: str) -> str:
    """Return the text with every character that a terminal acts on as an escape: `\\x1b` for ESC, `\\u202e`."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def print_line(text: str = "", file: IO[str] | None = None) -> None:
    """Print a line, on standard output unless `file` is given."""
    print(printable(text), file=file)


def print_warning(text: str) -> None:
    """Print a warning on standard error."""
    print_line(f"warning: {text}", sys.stderr)


def plain_text(text: str) -> Text:
    """Return text for rich to print as it is: without markup, emoji codes and control characters."""
    return Text(printable(text))


class TextTable(Table):
    """A table of rich whose headers and cells are plain text."""

    def add_column(self, header: Any = "", *args: Any, **options: Any) -> None:
        """Add a column; see rich."""
        super().add_column(plain_text(header), *args, **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row of texts."""
        super().add_row(*map(plain_text, cells), **options)


def make_table(first: str, *columns: str) -> TextTable:
    """Return an empty table without lines: the first column is left-aligned, the others right-aligned."""
    table = TextTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def relative_path(path: Path) -> str:
    """Return a path relative to the working directory if it lies below it, else as it is."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)


def format_duration(seconds: float) -> str:
    """Return a duration for people: 12 s, 3 min, 2 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def describe_completion(record: Mapping[str, Any]) -> str:
    """Return the end of a prompt, its completion and the reward in one line."""
    prompt = record["prompt"] if len(record["prompt"]) <= PROMPT_END else f"...{record['prompt'][-PROMPT_END:]}"
    reward = f"  reward {record['reward']:.3g}" if "reward" in record else ""
    return printable(f"{prompt!r} -> {record['completion']!r}{reward}")


# --- progress ---


class ProgressReporter:
    """Report the progress of a run: a live bar (one that is disabled is not shown), and log lines."""

    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress, self._total = progress, total
        self._marks: deque[tuple[float, int, float]] = deque()  # time, step and tokens, of the last RATE_OVER seconds
        self._last_line = time.perf_counter()
        self._fields: dict[str, Any] = {"score": "loss -", "dev": "-", "rate": "- steps/s"}
        self._tokens = 0.0  # generated since the first step
        self._task = progress.add_task("train", total=total, completed=done, **self._fields)

    def report_step(self, done: int, loss: float, reward: float | None = None, tokens: float = 0.0) -> None:
        """Show a step in the bar, and log it at every twentieth of the run or half minute.

        The mean reward of the step's completions is shown in place of the loss; `tokens` are those that it generated.
        """
        now = time.perf_counter()
        self._tokens += tokens if self._marks else 0.0  # the first step compiles, so it does not count
        self._marks.append((now, done, self._tokens))
        while now - self._marks[0][0] > RATE_OVER and len(self._marks) > 2:
            self._marks.popleft()
        start, first, before = self._marks[0]
        passed = max(now - start, 1e-9)
        rate = (done - first) / passed
        speed = f"{rate:.2f} steps/s" if rate < 10 else f"{rate:.1f} steps/s"
        speed = f"{1 / rate:.3g} s per step" if 0 < rate < 0.1 else speed
        speed += f"  {(self._tokens - before) / passed:,.0f} tokens/s" if self._tokens else ""
        score = f"loss {loss:.4f}" if reward is None else f"reward {reward:.4f}"
        self._fields.update(score=score, rate=speed if rate else "- steps/s")
        self._progress.update(self._task, completed=done, **self._fields)
        if done % max(1, self._total // 20) == 0 or now - self._last_line > LINE_EVERY:
            self._last_line = now
            left = ""
            if rate:  # `3 h 21 min left (17:05)`
                seconds = (self._total - done) / rate
                end = datetime.now() + timedelta(seconds=seconds)
                at = f" ({end:%a %H:%M})" if seconds > DAY else f" ({end:%H:%M})" if seconds > LATER else ""
                left = f"  {speed}  {format_duration(seconds)} left{at}"
            log.debug(STEP_LINE, len(str(self._total)), done, self._total, f"{score}{left}")

    def evaluation(self, total: int) -> Callable[[int], None]:
        """Return a function to call with the number of dev rows evaluated: the bar shows it, or else the log."""
        if self._progress.disable:
            return progress_log("evaluating dev", total, "rows")
        return lambda done: self._progress.update(self._task, **{**self._fields, "dev": f"{done}/{total}"})

    def report_dev(self, step: int, score: str, summary: str) -> None:
        """Show the score on dev in the bar, and log the summary of the evaluation."""
        self._fields["dev"] = score
        self._progress.update(self._task, **self._fields)
        log.info(STEP_LINE, len(str(self._total)), step, self._total, f"dev {summary}")


def progress_log(what: str, total: int, units: str = "steps") -> Callable[[int], None]:
    """Return a function to call with how much of long work is done: it logs a line after 5 s, then every half minute.

    The work, `what`, has a `total` of `units`.
    """
    began = time.perf_counter()
    next_line = began + 5

    def report(done: int) -> None:
        nonlocal next_line
        now = time.perf_counter()
        if now >= next_line and done:
            next_line = now + LINE_EVERY
            rate = done / (now - began)
            left = format_duration((total - done) / rate)
            log.info("%s: %d of %d %s  %.4g %s/s  %s left", what, done, total, units, rate, units, left)

    return report


@contextmanager
def progress_reporter(console: Console, total: int, done: int) -> Iterator[ProgressReporter]:
    """Yield the progress reporter of a run of `total` steps of which `done` are done."""
    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("[cyan]{task.fields[score]}[/]"),
        TextColumn("dev [green]{task.fields[dev]}[/]"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal or total == 0
    with Progress(*columns, console=console, refresh_per_second=4, expand=True, disable=hidden) as progress:
        yield ProgressReporter(progress, total, done)


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is called with the number of things done; on a terminal a bar shows it, else the log.

    `what` is counted, in the plural: `rows`, `test rows`. If standard output is data, give the console of errors.
    """
    if not console.is_terminal:
        yield progress_log(what, total, "rows")
        return
    columns = (TextColumn(what), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, expand=True, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


# --- console and log ---


class _Terminal:
    """Standard output on a terminal; what is written once the terminal is gone (a lost connection) is discarded.

    Without it, a run whose terminal is gone would fail by its next write instead of being recorded as interrupted.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard_output(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard_output(self._stream)


def is_live(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal whose lines may be redrawn: not one of CI, nor of a quiet command."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return not _quiet.get() and stream.isatty() and not in_ci and os.environ.get("TERM") != "dumb"


def make_console() -> Console:
    """Return the console. In a pipe, a file or CI its lines have any length, and there are no bars and no colours.

    rich itself heeds NO_COLOR.
    """
    file: Any = _Terminal(sys.stdout) if sys.stdout.isatty() else None
    return Console(file=file) if is_live(sys.stdout) else Console(file=file, width=1000, force_terminal=False)


def make_error_console() -> Console:
    """Return the console of standard error, for the log and bars of a command whose standard output is data."""
    return Console(stderr=True) if is_live(sys.stderr) else Console(stderr=True, width=1000, force_terminal=False)


class LogFormatter(logging.Formatter):
    """Format a log record as one printable line, followed by its traceback if it has one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: D102, N802 (logging's name)
        return printable(without_credentials(re.sub(r"\s*\n\s*", " ", super().formatMessage(record))))

    def formatException(self, ei: Any) -> str:  # noqa: D102, N802 (logging's name)
        return printable(without_credentials(super().formatException(ei)))


class _TerminalHandler(RichHandler):
    """Log lines above the bar, broken between words; one that ends in a command is left whole, to be copied."""

    def emit(self, record: logging.LogRecord) -> None:
        if COMMAND.search(record.getMessage()):
            self.console.print(plain_text(self.format(record)), soft_wrap=True)
        else:
            super().emit(record)


class _PlainHandler(logging.StreamHandler):
    """Plain log lines. Neither a closed pipe (`| head`) nor a full disk stops a run: train.log has every line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextmanager
def console_logging(console: Console, quiet: bool = False) -> Iterator[None]:
    """Show the log on the console inside the block: above the bar on a terminal, as plain lines otherwise.

    If `quiet`, only warnings and errors are shown. Afterwards the logger is as it was, for the program around it.
    """
    handler: logging.Handler = _PlainHandler(console.file)
    handler.setLevel(logging.DEBUG)
    if console.is_terminal:
        handler = _TerminalHandler(
            console=console, show_path=False, show_level=False, show_time=False, highlighter=NullHighlighter()
        )
        handler.setLevel(logging.INFO)  # the bar shows the steps
    if quiet:
        handler.setLevel(logging.WARNING)
    handler.setFormatter(LogFormatter("%(message)s"))
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    token = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(token)
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


@contextmanager
def training_output(quiet: bool) -> Iterator[Console]:
    """Show the log of a training inside the block; yield the console for its bars and tables.

    It is the log's own: rich prints a line above a bar only on the console of the bar. If `quiet`, warnings and errors
    go to standard error, and there are no bars.
    """
    console = make_error_console() if quiet else make_console()
    with console_logging(console, quiet):
        yield make_console() if quiet else console


def announce(path: Path) -> None:
    """Print the directory of a run, for a quiet command the one line on standard output, at once."""
    print_line(relative_path(path))
    sys.stdout.flush()


@contextmanager
def json_at_end(wanted: bool) -> Iterator[dict[Path, Describe]]:
    """Yield what takes a directory -> what returns its document, which is printed when the block ends.

    It is printed also where the block ends with an error, but not where that came before there was a directory.
    Everything else goes to standard error.
    """
    told, output = dict[Path, Describe](), sys.stdout
    try:
        with redirect_stdout(sys.stderr if wanted else output):
            yield told
    finally:
        for path, describe in told.items():
            if wanted and path.is_dir():
                print_line(json.dumps(describe(), indent=2), output)
