"""Console output of a run: a bar on a terminal, plain lines elsewhere."""

import io
import logging
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mezo_cli import console as console_module
from mezo_cli.console import LogFormatter, console_logging, make_table, printable, progress_reporter, training_output
from tests.command_line import small
from tests.terminal import on_a_terminal


@pytest.mark.slow
def test_a_terminal_has_a_bar(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = ["train", *small(roberta, movies, tmp_path / "run", "steps=12", "eval_every=6")]
    code, seen = on_a_terminal(words, tmp_path)
    assert code == 0, seen
    bars = re.findall(r"(\d+)/12 loss (\S+) dev (\S+) (\S+) steps/s (-:--:--|\d:\d\d:\d\d)", seen)
    assert len(bars) > 2
    done, loss, dev, rate, _ = bars[-1]
    assert done == "12"
    assert float(loss) > 0
    assert dev.endswith("%")
    assert float(rate) > 0
    assert "step  6/12  dev accuracy" in seen
    assert not re.search(r"step +\d+/12  loss", seen)
    assert "dev before training" in seen
    assert "step  6/12  loss" in (tmp_path / "run" / "train.log").read_text()


def test_a_pipe_has_plain_lines_that_are_never_wrapped() -> None:
    file = io.StringIO()
    console = Console(file=file, width=1000)
    with console_logging(console), progress_reporter(console, 40, 0) as progress:
        for step in range(1, 41):
            progress.report_step(step, 0.5)
        progress.report_dev(40, "75.0%", "accuracy  75.0%" + " x" * 100)
    lines = file.getvalue().splitlines()
    assert len(lines) == 21
    assert re.fullmatch(r"step  2/40  loss 0\.5000  \S+ steps/s  \S+ s left", lines[0])
    assert lines[-1] == "step 40/40  dev accuracy  75.0%" + " x" * 100
    assert "\x1b" not in file.getvalue()


def test_a_rate_is_that_of_the_last_minutes_and_a_late_end_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock = io.StringIO(), iter([0.0, *range(1, 11), *range(110, 5010, 100)])  # ten fast steps, then slow ones
    monkeypatch.setattr(console_module.time, "perf_counter", lambda: float(next(clock)))
    console = Console(file=file, width=1000)
    with console_logging(console), progress_reporter(console, 1000, 0) as progress:
        for step in range(1, 30):
            progress.report_step(step, 0.5)
    assert re.search(r"100 s per step  26 h \d\d min left \(\w+ \d\d:\d\d\)", file.getvalue().splitlines()[-1])


def test_a_terminal_breaks_texts_between_words_and_commands_never() -> None:
    file = io.StringIO()
    with console_logging(Console(file=file, width=40, force_terminal=True)):
        for text in ("a verdict " * 9, f"stopped; resume with: mezo resume {'x' * 50} --jobs 2"):
            console_module.log.info(text)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines[:-1])) <= 40
    assert lines[-1] == f"stopped; resume with: mezo resume {'x' * 50} --jobs 2"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "live", "coloured"),
    [
        ({}, True, True),
        ({"CI": "true"}, False, False),
        ({"CI": "false"}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, True, False),
    ],
)
def test_ci_or_no_color(variables: dict[str, str], live: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **variables}.items():
        monkeypatch.setenv(name, value)
    for stream, make in (("stdout", console_module.make_console), ("stderr", console_module.make_error_console)):
        terminal = FakeTerminal()
        monkeypatch.setattr(sys, stream, terminal)
        console = make()
        with console_logging(console), progress_reporter(console, 40, 0) as progress:
            for step in range(1, 41):
                progress.report_step(step, 0.5)
            progress.report_dev(40, "75.0%", "accuracy  75.0%")
        seen = terminal.getvalue()
        assert console.is_terminal == live
        assert ("\x1b[?25l" in seen) == live  # the cursor is hidden while a bar is drawn
        assert bool(re.search(r"\x1b\[(3[0-9]|38;)", seen)) == coloured
        assert ("step  2/40  loss 0.5000" in seen) == (not live)
        assert "step 40/40  dev accuracy  75.0%" in seen


def test_a_quiet_training_has_no_bar_and_its_warnings_are_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out, err = FakeTerminal(), FakeTerminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    log = logging.getLogger("mezo")
    with training_output(quiet=True) as console, progress_reporter(console, 40, 0) as progress:
        assert not console_module.is_live(err)  # so downloads have no bars either
        for step in range(1, 41):
            progress.report_step(step, 0.5)
        log.info("nothing")
        log.warning("careful")
    assert (out.getvalue(), err.getvalue().split()) == ("", ["careful"])
    assert console_module.is_live(err)


def test_printable_escapes_what_a_terminal_acts_on_and_nothing_else() -> None:
    text = "naïve 電影 \U0001f600 [b]\ttab\n"
    assert printable(text) == text
    acted_on = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x202E, 0x2066, 0x200F, 0x2028, 0xDC80]
    for number in acted_on:
        assert printable(f"a{chr(number)}b") == f"a{ascii(chr(number))[1:-1]}b"


def test_a_table_shows_its_cells_as_they_are() -> None:
    table = make_table("[b]x", "[/y]")
    table.add_row(":smile:", "\x1b[31m")
    file = io.StringIO()
    Console(file=file, width=100).print(table)
    assert [line.split() for line in file.getvalue().splitlines()] == [["[b]x", "[/y]"], [":smile:", "\\x1b[31m"]]


def test_a_log_record_is_one_printable_line_and_its_traceback() -> None:
    formatter = LogFormatter("%(message)s")
    record = logging.LogRecord("mezo", logging.INFO, "", 0, "  one %s", ("two\n three\x1b",), None)
    assert formatter.format(record) == "  one two three\\x1b"
    try:
        raise ValueError("\x1b]0;title\x07")
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = formatter.format(record).splitlines()
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "ValueError: \\x1b]0;title\\x07"
