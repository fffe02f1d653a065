"""Show one run on the terminal, in the order of its page; or return the same as a JSON document."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console

from mezo_cli.console import TextTable, make_table, plain_text, printable
from mezo_cli.report.details import Prediction, RunDetails
from mezo_cli.report.figures import shown_shares
from mezo_cli.report.page import run_warnings
from mezo_cli.report.series import Histogram

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-:=+*#"  # for an encoding without the blocks
WIDTH = 80  # of every line but the commands, which are there to be copied
SPARK = 24  # characters of a sparkline
EXAMPLES = 3  # right and wrong test rows each


def show_details(run: RunDetails, console: Console) -> None:
    """Print what a run was, its result, its curves as sparklines, some test rows, its settings and commands."""
    width = min(console.width, WIDTH)

    def say(text: str, indent: str = "") -> None:
        lines = textwrap.wrap(printable(" ".join(text.split())), width, initial_indent=indent, subsequent_indent=indent)
        for line in lines or [""]:
            console.print(plain_text(line), soft_wrap=True)

    console.print(plain_text(f"{run.name}  {run.entry.status}"))
    say(run.sentence())
    for text in run_warnings(run):
        say(f"! {text}")
    if run.prompt is not None:
        console.print()
        say(f"prompt  {run.prompt}")
        say(", ".join(f"{word} = {label}" for label, word in run.label_words()), "        ")
    for table in (_results(run), _curves(run, _blocks(console))):
        if table.row_count:
            console.print()
            console.print(table, width=width)
    if said := run.baseline_sentence():
        console.print()
        say(said)
    console.print()
    if run.examples.message:
        say(run.examples.message)
    for name, rows, count in _examples(run):
        say(f"{min(EXAMPLES, len(rows))} of the {count} {name} test rows")
        for one in rows[:EXAMPLES]:
            given = "" if one.label == one.predicted else f", label {one.label}"
            text = textwrap.shorten(
                " / ".join(one.texts.values()), max(20, width - 40 - len(given)), placeholder=" ..."
            )
            say(f"{one.predicted} {one.confidence:.2f}{given}: {text}", "  ")
    for title, pairs in (("settings that differ from the defaults", _settings(run)), ("where it ran", run.facts())):
        console.print()
        console.print(plain_text(title))
        console.print(_pairs(pairs), width=width)
    console.print()
    for name, command in run.commands():
        console.print(plain_text(f"{name.lower()}:  {command}"), soft_wrap=True)


def show_result(run: RunDetails, console: Console) -> None:
    """Print the warnings about a run, and its result."""
    for text in run_warnings(run):
        console.print(plain_text(f"! {text}"), soft_wrap=True)
    console.print(_results(run), width=min(console.width, WIDTH))
    if said := run.baseline_sentence():
        console.print(plain_text(said), soft_wrap=True)


def _blocks(console: Console) -> str:
    try:
        BLOCKS.encode(console.encoding)
        return BLOCKS
    except (UnicodeEncodeError, LookupError):
        return PLAIN_BLOCKS


def sparkline(
    values: Sequence[float] | np.ndarray, blocks: str = BLOCKS, low: float | None = None, high: float | None = None
) -> str:
    """Return values as one line of blocks, at most `SPARK` of them: each is the mean of a part of the values.

    Args:
        values: one or more.
        blocks: from the lowest to the highest.
        low, high: the values of the lowest and of the highest block; the least and the greatest if not given.
    """
    parts = np.array_split(np.asarray(values, float), min(SPARK, len(values)))
    means = np.array([part.mean() for part in parts])
    low = float(means.min()) if low is None else low
    span = (float(means.max()) if high is None else high) - low
    levels = (means - low) / span * (len(blocks) - 1) if span > 0 else np.zeros(len(means))
    return "".join(blocks[int(level + 0.5)] for level in levels)


def _results(run: RunDetails) -> TextTable:
    found = run.results()
    columns = [run.metric, "accuracy", "loss", "at step", *(["95% interval"] if any(r.interval for r in found) else [])]
    table = make_table("", *dict.fromkeys(columns))
    for one in found:
        scores = [f"{100 * one.score:.1f}%"] + ([] if run.metric == "accuracy" else [f"{100 * one.accuracy:.1f}%"])
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        table.add_row(one.name, *scores, loss, str(one.step), *([one.interval] if "95% interval" in columns else []))
    return table


def _curves(run: RunDetails, blocks: str) -> TextTable:
    table = TextTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for column in ("", "", ""):
        table.add_column(column, overflow="fold")
    if run.loss is not None:
        smooth = run.loss.smooth
        table.add_row("loss", sparkline(smooth, blocks), f"{smooth[0]:.4f} to {smooth[-1]:.4f}")
    if run.dev is not None and len(run.dev.scores) > 1:
        table.add_row(f"dev {run.metric}", sparkline(run.dev.scores, blocks), f"best {run.dev.best_text()}")
    if run.dev is not None:
        for label, shares in shown_shares(run.dev.shares).items():
            ends = (
                f"{100 * shares[0]:.0f}% to {100 * shares[-1]:.0f}%" if len(shares) > 1 else f"{100 * shares[0]:.0f}%"
            )
            table.add_row(f"predicted {label}", sparkline(shares, blocks, 0.0, 1.0), ends)
    if run.gradients is not None:
        counts = run.gradients.counts
        bars = sparkline(counts, blocks, 0.0) if counts.size else ""  # all of them may be 0
        table.add_row("|g|, histogram", bars, _gradient_text(run, run.gradients))
    if run.speed is not None:
        median = float(np.median(run.speed.values))
        table.add_row("steps/s", sparkline(run.speed.smooth, blocks, 0.0), f"median {median:.3g}")
    return table


def _gradient_text(run: RunDetails, found: Histogram) -> str:
    stats = run.gradient_stats
    return f"{100 * found.zeros / found.total:.1f}% zero, mean {stats['mean_abs']:.2g}, up to {stats['max_abs']:.2g}"


def _examples(run: RunDetails) -> list[tuple[str, list[Prediction], int]]:
    found = run.examples
    both = (("correct", found.right, found.right_count), ("wrong", found.wrong, found.wrong_count))
    return [one for one in both if one[2]]


def _settings(run: RunDetails) -> list[tuple[str, str]]:
    return [(key, f"{value} (default {default})") for key, value, default in (one.texts() for one in run.settings())]


def _pairs(pairs: Sequence[tuple[str, str]]) -> TextTable:
    table = TextTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, value in pairs:
        table.add_row(f"  {name}", value)
    return table


# --- JSON ---


def document(run: RunDetails) -> dict[str, Any]:
    """Return what `show_details` prints, with the numbers of every evaluation and all test rows shown on the page."""
    entry, dev, examples = run.entry, run.dev, run.examples
    scores = [
        {run.metric: one.score, **{key: value for key, value in asdict(one).items() if key != "score"}}
        for one in run.results()
    ]
    evaluations = dev and [
        {"step": step, run.metric: score, "loss": loss, "predicted_shares": shares}
        for step, score, loss, shares in zip(dev.steps, dev.scores, dev.losses, dev.shares, strict=True)
    ]
    return {
        "run": run.name,
        "status": entry.status,
        "error": entry.error,
        "verdict": entry.verdict,
        "sentence": run.sentence(),
        "warnings": run_warnings(run),
        "prompt": run.prompt,
        "label_words": dict(run.label_words()),
        "steps": {"done": entry.steps_done, "planned": run.config.steps},
        "metric": run.metric,
        "results": scores,
        **{key: entry.summary.get(key) for key in ("difference", "baselines")},
        "dev": evaluations or [],
        "loss": None if run.loss is None else {"steps": run.loss.steps.tolist(), "values": run.loss.values.tolist()},
        "projected_grad": dict(run.gradient_stats),
        "steps_per_second": None if run.speed is None else float(np.median(run.speed.values)),
        "right": [_record(one) for one in examples.right],
        "wrong": [_record(one) for one in examples.wrong],
        "settings": {one.key: {"value": one.value, "default": one.default} for one in run.settings()},
        "facts": dict(run.facts()),
        "versions": dict(run.versions()),
        "commands": dict(run.commands()),
    }


def _record(one: Prediction) -> dict[str, Any]:
    return {
        "row": one.row,
        "columns": dict(one.texts),
        "label": one.label,
        "predicted": one.predicted,
        "probabilities": dict(one.probabilities),
    }
