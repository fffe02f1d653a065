"""Show one run on the terminal, in the order of its page; or return the same as a JSON document."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from mezo_cli.console import TextTable, describe_completion, make_table, plain_text, printable
from mezo_cli.report.details import RunDetails, confidence, predicted_fractions, thin_indices
from mezo_cli.report.settings import changed_settings, format_loss, format_score, format_value
from mezo_cli.runs.scores import metrics_of

WIDTH = 80  # of every line but the commands, which are there to be copied
EXAMPLES = 3  # right and wrong test rows each, and completions
EXAMPLE_WIDTH = 3  # lines of a completion


def show_details(run: RunDetails, console: Console) -> None:
    """Print what a run was, its result, how its steps went, some test rows, its settings and commands."""
    width = min(console.width, WIDTH)

    def say(text: str, indent: str = "") -> None:
        lines = textwrap.wrap(printable(" ".join(text.split())), width, initial_indent=indent, subsequent_indent=indent)
        for line in lines or [""]:
            console.print(plain_text(line), soft_wrap=True)

    console.print(plain_text(f"{run.name}  {run.entry.status}"))
    say(run.sentence())
    for text in run.warnings():
        say(f"! {text}")
    if run.prompt is not None:
        console.print()
        say(f"prompt  {run.prompt}")
        if words := run.label_words():
            say(", ".join(f"{word} = {label}" for label, word in words), "        ")
    if run.dev:
        console.print()
        console.print(_results(run), width=width)
    for sentence in run.conclusions():
        console.print()
        say(sentence)
    console.print()
    if run.examples.message:
        say(run.examples.message)
    for name, rows in (("correct", run.examples.right), ("wrong", run.examples.wrong)):
        if rows:
            say(f"{min(EXAMPLES, len(rows))} of the {run.examples.count(name == 'correct')} {name} test rows")
        for row in rows[:EXAMPLES]:
            label = "" if row["label"] == row["predicted"] else f", label {row['label']}"
            text = " / ".join(row["columns"].values())
            short = textwrap.shorten(text, max(20, width - 40 - len(label)), placeholder=" ...")
            say(f"{row['predicted']} {confidence(row):.2f}{label}: {short}", "  ")
    completions = run.examples.completions
    if completions:
        say(f"{min(EXAMPLES, len(completions))} test rows, from the best completion to the worst")
    for row in (completions[i] for i in thin_indices(len(completions), EXAMPLES)):
        scores = ", ".join(f"{name} {value:.4g}" for name, value in metrics_of(row).items())
        texts = [value for value in row.values() if isinstance(value, str)]  # the prompt, the completion
        say(f"{scores}: {' / '.join(texts)}"[: EXAMPLE_WIDTH * width], "  ")
    for step in list(run.completions)[-1:]:
        say(f"dev rows at {run.name_step(step)}")
        for row in run.completions[step][:EXAMPLES]:
            say(describe_completion(row), "  ")
    changed = changed_settings(run.config)
    settings = [(key, f"{format_value(value)} (default {format_value(usual)})") for key, value, usual in changed]
    lists = {"how it went": _steps(run), "settings that differ from the defaults": settings}
    for title, pairs in {**lists, "where it ran": run.facts()}.items():
        console.print()
        console.print(plain_text(title))
        console.print(_pairs(pairs), width=width)
    console.print()
    for name, command in run.commands():
        console.print(plain_text(f"{name.lower()}:  {command}"), soft_wrap=True)


def show_result(run: RunDetails, console: Console) -> None:
    """Print the warnings about a run, and its result."""
    for text in run.warnings():
        console.print(plain_text(f"! {text}"), soft_wrap=True)
    console.print(_results(run), width=min(console.width, WIDTH))
    for sentence in run.conclusions():
        console.print(plain_text(sentence), soft_wrap=True)


def _results(run: RunDetails) -> TextTable:
    results = run.results()
    metrics = list(dict.fromkeys(name for one in results for name in one.scores if name != "loss"))
    has_intervals = any(one.interval for one in results)
    table = make_table("", *metrics, "loss", "at step", *["95% interval"] * has_intervals)
    for one in results:
        scores = [format_score(name, one.scores[name], "%") if name in one.scores else "" for name in metrics]
        loss = format_loss(one.scores["loss"]) if "loss" in one.scores else ""
        table.add_row(one.name, *scores, loss, str(one.step), *[one.interval] * has_intervals)
    return table


def _steps(run: RunDetails) -> list[tuple[str, str]]:
    """Return how losses and predictions have changed, the projected gradients and the speed: (name, value)."""
    pairs = []
    if len(run.losses):
        ends = (f"{run.losses[at]:.4f} at step {run.steps[at]:,}" for at in (0, -1))
        pairs.append(("loss", ", ".join(ends)))
    if run.dev:
        scores = [format_score(run.metric, line[run.metric]) for line in run.dev]
        shown = scores if len(scores) <= 8 else [*scores[:4], "...", *scores[-4:]]
        pairs.append((f"dev {run.metric}", " ".join(shown)))
        first, last = predicted_fractions(run.dev[0]), predicted_fractions(run.dev[-1])
        pairs += [(f"predicted {label}", f"{100 * first[label]:.0f}% to {100 * last[label]:.0f}%") for label in first]
    stats = run.gradient_stats
    if stats["zero_fraction"] is not None:
        sizes = f"mean {stats['mean_abs']:.2g}, up to {stats['max_abs']:.2g}"
        pairs.append((f"|{run.optimizer.symbol}|", f"{100 * stats['zero_fraction']:.1f}% zero, {sizes}"))
    if run.median_speed is not None:
        pairs.append(("steps/s", f"median {run.median_speed:.3g}"))
    return pairs


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
    entry, examples = run.entry, run.examples
    fields = ("row", "columns", "label", "predicted", "probabilities")
    results = [{**asdict(one), **one.scores} for one in run.results()]
    dev = [{**line, "predicted_fractions": predicted_fractions(line)} for line in run.dev]
    settings = {key: {"value": value, "default": usual} for key, value, usual in changed_settings(run.config)}
    return {
        "run": run.name,
        "status": entry.status,
        "error": entry.error,
        "verdict": entry.verdict,
        "sentence": run.sentence(),
        "warnings": run.warnings(),
        "prompt": run.prompt,
        "label_words": dict(run.label_words()),
        "steps": {"done": entry.steps_done, "planned": run.config.steps},
        "metric": run.metric,
        "results": [{key: value for key, value in one.items() if key != "scores"} for one in results],
        **{key: entry.summary.get(key) for key in ("difference", "baselines")},
        "dev": [{key: value for key, value in line.items() if key not in ("crc", "kind", "split")} for line in dev],
        "loss": {"steps": run.steps.tolist(), "values": run.losses.tolist()} if len(run.losses) else None,
        run.optimizer.scalar: dict(run.gradient_stats),
        "steps_per_second": run.median_speed,
        "right": [{name: row[name] for name in fields} for row in examples.right],
        "completions": list(examples.completions),
        "wrong": [{name: row[name] for name in fields} for row in examples.wrong],
        "dev_completions": run.completions,
        "settings": settings,
        "facts": dict(run.facts()),
        "versions": dict(run.versions()),
        "commands": dict(run.commands()),
    }
