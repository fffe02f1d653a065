"""`mezo predict`: labels and probabilities for the user's own texts."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.commands.open_run import open_run
from mezo_cli.console import console_logging, make_console, make_error_console, print_line, progress_bar
from mezo_cli.data import texts
from mezo_cli.distributed.ranks import in_turn, joined
from mezo_cli.errors import UserError, join
from mezo_cli.process.signals import import_torch
from mezo_cli.report.tables import csv_text
from mezo_cli.runs.atomic import check_output, write_output

if TYPE_CHECKING:  # it imports torch
    from mezo_cli.objectives.prediction import Predicted
    from mezo_cli.session.session import Session

STDIN = "standard input"
NO_TEXT = f"{STDIN}: no text; give --text, --file, or one text per line"
FORMATS = (".jsonl", ".csv")  # of --out


def predict(
    path: Path,
    words: Sequence[str],
    file: Path | None,
    checkpoint: str | None,
    base: Path | None,
    as_json: bool,
    out: Path | None,
    quiet: bool = False,
) -> None:
    """Predict rows with the weights of a run, and print or write label and probabilities."""
    if words and file is not None:
        raise UserError("--text and --file: give one of them")
    if out is not None:
        check_output(out, FORMATS)
    with joined() as ranks, console_logging(make_error_console(), quiet):
        if ranks.size > 1 and not words and file is None:
            why = "one process reads it: give --text or --file"
            raise UserError(f"{STDIN}: {ranks.size} ranks were started, and {why}")
        with in_turn(ranks):
            opened = open_run(path, checkpoint, base)
        task = opened.config.data_task
        if task.demonstrations:
            why = "a row of one's own has none; mezo eval evaluates the run's splits"
            raise UserError(f"{opened.name} has task.demonstrations={task.demonstrations}, and {why}")
        rows = texts.from_words(words, task) if words else None if file is None else texts.from_file(file, task)
        import_torch()
        from mezo_cli.process.memory import explain_device_errors
        from mezo_cli.session.opening import prepare

        if ranks.size > 1:
            ranks.check_same("input", "\n".join(str(row.columns or row.texts) for row in rows or []))
        explained = explain_device_errors(f"{opened.name}: predicting", "again when the device has more free memory")
        with prepare(opened.config, opened.load, splits=()).session as session, explained:
            max_length = session.encoder.max_length
            stream = rows is None and not as_json and out is None
            if stream:
                predictions, cut = [], _answer_lines(session, quiet)
            else:
                rows = rows or list(texts.from_lines(sys.stdin.buffer, STDIN, task))
                if not rows:
                    raise UserError(NO_TEXT)
                with progress_bar(make_error_console(), "rows", len(rows)) as report:
                    predictions = session.predict(rows, report)
                cut = Counter(prediction.cut for prediction in predictions)
    if not ranks.is_first:
        return
    if cut[True]:
        verb = "was" if cut[True] == 1 else "were"
        text = f"note: {cut[True]} of {cut.total()} rows {verb} longer than {max_length} tokens and {verb} cut"
        print_line(text, sys.stderr)
    if out is not None:
        write_output(out, _text_of(predictions, texts.prompt_columns(task), out.suffix))
    if as_json:
        which = {"run": str(opened.run.path), "checkpoint": opened.checkpoint}
        print_line(json.dumps({**which, "cut": cut[True], "rows": _numbered(predictions)}, indent=2))
    elif out is not None:
        if not quiet:
            print_line(f"wrote {len(predictions)} rows to {out}")
    elif not stream:
        _print(predictions, quiet)


def _answer_lines(session: "Session", quiet: bool) -> Counter[bool]:
    """Print the prediction of each line of standard input when it has come; return how many rows were cut, or not.

    No prediction is kept: the lines may come for ever (`tail -f`).
    """
    task = session.config.data_task
    columns = texts.prompt_columns(task)
    if sys.stdin.isatty() and not quiet:
        fields = f", its {join(columns)} separated by tabs" if len(columns) > 1 else ""
        print_line(f"one text per line{fields}; Ctrl-D ends", sys.stderr)
    cut = Counter[bool]()
    for row in texts.from_lines(iter(sys.stdin.buffer.readline, b""), STDIN, task):
        predictions = session.predict([row])
        _print(predictions, quiet)
        sys.stdout.flush()
        cut[predictions[0].cut] += 1
    if not cut:
        raise UserError(NO_TEXT)
    return cut


def _print(predictions: Sequence["Predicted"], quiet: bool) -> None:
    """Print a line per row: the label, the probability of each label, the texts; or the prompt and the completion.

    Lines are cut to the terminal's width. If `quiet`, the label or the completion alone.
    """
    width = make_console().width if sys.stdout.isatty() else None
    for one in predictions:
        if quiet:
            print_line(one.answer)
            continue
        line = one.line()
        print_line(line if width is None or len(line) <= width else line[: width - 3] + "...")


def _numbered(predictions: Iterable["Predicted"]) -> list[dict[str, Any]]:
    return [{"row": number, **asdict(one)} for number, one in enumerate(predictions)]


def _text_of(predictions: Sequence["Predicted"], columns: Sequence[str], suffix: str) -> str:
    if suffix == ".jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _numbered(predictions))
    return csv_text([{**{name: str(one.columns[name]) for name in columns}, **one.figures()} for one in predictions])
