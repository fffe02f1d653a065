"""Show the document of one run on the terminal, in the order of its page; and its results in the log."""

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from mezo_cli.console import TextTable, describe_completion, make_table, plain_text, printable
from mezo_cli.report.document import thin
from mezo_cli.report.settings import format_value
from mezo_cli.runs.contents import format_score, metrics_of

WIDTH = 80  # of every line but the commands, which are there to be copied
LOG_WIDTH = 100
EXAMPLES = 3  # right and wrong test rows each, and completions
EXAMPLE_WIDTH = 3  # lines of a completion


def show_document(run: Mapping[str, Any], console: Console) -> None:
    """Print what a run was, its result, how its steps went, some test rows, its settings and commands."""
    width = min(console.width, WIDTH)

    def say(text: str, indent: str = "", gap: bool = False) -> None:
        lines = textwrap.wrap(printable(" ".join(text.split())), width, initial_indent=indent, subsequent_indent=indent)
        for line in [*[""] * gap, *(lines or [""])]:
            console.print(plain_text(line), soft_wrap=True)

    console.print(plain_text(f"{run['run']}  {run['outcome']}"), soft_wrap=True)
    for text in (run["sentence"], *(f"! {text}" for text in run["warnings"])):
        say(text)
    if run["prompt"] is not None:
        say(f"prompt  {run['prompt']}", gap=True)
        if run["label_words"]:
            say(", ".join(f"{word} = {label}" for label, word in run["label_words"].items()), "        ")
    if run["results"]:
        console.print()
        console.print(result_table(run["results"]), width=width)
    for text in run["conclusions"]:
        say(text, gap=True)
    console.print()
    for text, indent in _rows(run, width):
        say(text, indent)
    values = {key: [format_value(one[of]) for of in ("value", "default")] for key, one in run["settings"].items()}
    settings = {key: f"{value} (default {default})" for key, (value, default) in values.items()}
    lists = {"how it went": _steps(run), "settings that differ from the defaults": settings}
    for title, pairs in {**lists, "where it ran": run["facts"]}.items():
        table = make_table("", "")
        table.show_header, table.columns[1].justify = False, "left"
        for name, value in pairs.items():
            table.add_row(f"  {name}", value)
        say(title, gap=True)
        console.print(table, width=width)
    console.print()
    for name, command in run["commands"].items():
        console.print(plain_text(f"{name.lower()}:  {command}"), soft_wrap=True)


def result_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of results as lines for a log."""
    file = io.StringIO()
    Console(file=file, width=LOG_WIDTH, force_terminal=False, force_jupyter=False).print(result_table(results))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def result_table(results: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return a table of the `results` of a run's document."""
    names = dict.fromkeys(name for one in results for name in metrics_of(one))
    metrics = sorted(names, key=lambda name: name == "loss")
    has_intervals = any(one["interval"] for one in results)
    table = make_table("", *metrics, "at step", *["95% interval"] * has_intervals)
    for one in results:
        scores = [format_score(name, one[name], "%") if name in one else "" for name in metrics]
        table.add_row(one["name"], *scores, str(one["step"]), *[one["interval"]] * has_intervals)
    return table


def _rows(run: Mapping[str, Any], width: int) -> Iterable[tuple[str, str]]:
    if run["no_test_rows"]:
        yield run["no_test_rows"], ""
    for name, rows in (("correct", run["right"]), ("wrong", run["wrong"])):
        if rows:
            yield f"{min(EXAMPLES, len(rows))} of the {run['test_rows'][name]} {name} test rows", ""
        for row in rows[:EXAMPLES]:
            label = "" if row["label"] == row["predicted"] else f", label {row['label']}"
            text = " / ".join(row["columns"].values())
            short = textwrap.shorten(text, max(20, width - 40 - len(label)), placeholder=" ...")
            yield f"{row['predicted']} {row['probabilities'][row['predicted']]:.2f}{label}: {short}", "  "
    if run["completions"]:
        yield f"{min(EXAMPLES, len(run['completions']))} test rows, from the best completion to the worst", ""
    for row in thin(run["completions"], EXAMPLES):
        scores = ", ".join(f"{name} {value:.4g}" for name, value in metrics_of(row).items())
        texts = " / ".join(value for value in row.values() if isinstance(value, str))  # the prompt, the completion
        yield f"{scores}: {texts}"[: EXAMPLE_WIDTH * width], "  "
    for step, rows in list(run["dev_completions"].items())[-1:]:
        yield f"dev rows at {run['step_names'][step]}", ""
        yield from ((describe_completion(row), "  ") for row in rows[:EXAMPLES])


def _steps(run: Mapping[str, Any]) -> dict[str, str]:
    pairs, dev, metric = {}, run["dev"], run["metric"]
    if loss := run["loss"]:
        pairs["loss"] = ", ".join(f"{loss['values'][at]:.4f} at step {loss['steps'][at]:,}" for at in (0, -1))
    if dev:
        scores = [format_score(metric, line[metric]) for line in dev]
        pairs[f"dev {metric}"] = " ".join(scores if len(scores) <= 8 else [*scores[:4], "...", *scores[-4:]])
        first, last = (dev[at]["predicted_fractions"] for at in (0, -1))
        pairs |= {f"predicted {label}": f"{100 * first[label]:.0f}% to {100 * last[label]:.0f}%" for label in first}
    stats = run[run["scalar"]]
    if stats["zero_fraction"] is not None:
        sizes = f"mean {stats['mean_abs']:.2g}, up to {stats['max_abs']:.2g}"
        pairs[f"|{run['symbol']}|"] = f"{100 * stats['zero_fraction']:.1f}% zero, {sizes}"
    return pairs
