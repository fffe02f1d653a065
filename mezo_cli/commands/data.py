"""`mezo data`: show the data as the model sees it, or write the splits that are drawn."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mezo_cli.commands.execute import load_encoder
from mezo_cli.commands.own_task import propose_command
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.console import TextTable, console_logging, make_console, make_error_console, make_table, print_line
from mezo_cli.errors import UserError
from mezo_cli.process.signals import import_torch

if TYPE_CHECKING:
    from mezo_cli.tasks import ClassificationEncoder, InputEncoder

SHOWN = 3  # rows with prompt and answer
LENGTHS = ("min", "median", "p95", "max")


def data(overrides: Sequence[str], export: Path | None, words: bool, config_dir: str | None) -> None:
    """Show the splits and a few prompts; write the files of the splits, without the model; or propose label words."""
    from mezo_cli import data as sources

    if words and export is not None:
        raise UserError("--words and --export: give one of them")
    config = build_config(overrides, config_dir)
    if command := propose_command(config, overrides, config_dir):
        print_line(f"no task is given for these rows; a proposal, to be looked at:\n{command}")
        return
    if words:
        with console_logging(make_error_console()):
            import_torch()
            from mezo_cli.commands.propose_words import propose

            for line in propose(config):
                print_line(line)
        return
    if export is not None:
        for path in sources.export(config.data_task, config.data, config.data_seed, export, warn=_note):
            print_line(f"wrote {path}")
        return
    splits = sources.load(config.data_task, config.data, config.data_seed)
    for note in splits.notes:
        _note(note)
    encoder = load_encoder(config)
    named = {"train": splits.train, "dev": splits.dev, "test": splits.test or []}
    show = _show_labels if config.objective.needs_labels else _show_rows
    show(encoder, {name: examples for name, examples in named.items() if examples})


def _show_labels(encoder: "ClassificationEncoder", named: Mapping[str, Sequence[Example]]) -> None:
    labels = encoder.task.labels
    by_label, words = make_table("rows per label", *labels), make_table("words per row", *LENGTHS)
    for name, examples in named.items():
        counts = Counter(example.label for example in examples)
        by_label.add_row(f"  {name}", *(str(counts[i]) for i in range(len(labels))))
        words.add_row(f"  {name}", *_lengths([sum(len(text.split()) for text in row.texts) for row in examples]))
    _print(by_label, words)
    print_line("prompts, as the model sees them:")
    first = {row.label: row for row in reversed(named["train"])}  # of each label
    for index in sorted(first):
        encoded = encoder.encode(first[index])
        word = f" -> '{encoder.label_words[index]}'" if encoder.label_words else ""
        print_line(f"  {encoder.decode(encoded)}   [{labels[index]}{word}; {len(encoded.input_ids)} tokens]")


def _show_rows(encoder: "InputEncoder[Any]", named: Mapping[str, Sequence[Example]]) -> None:
    rows = {name: encoder.encode_all(examples) for name, examples in named.items()}
    tables = [make_table(title, *LENGTHS) for title in encoder.sizes(rows["train"][0])]
    for title in ("rows", "cut"):
        tables[0].add_column(title, justify="right")
    for name, encoded in rows.items():
        sizes = [list(encoder.sizes(row).values()) for row in encoded]
        counts = (len(encoded), sum(row.cut for row in encoded))
        for i, table in enumerate(tables):
            table.add_row(f"  {name}", *_lengths([size[i] for size in sizes]), *map(str, counts if i == 0 else ()))
    _print(*tables)
    print_line("prompts and what follows them, as the model sees them:")
    for example, row in zip(named["train"][:SHOWN], rows["train"], strict=False):
        size = " + ".join(str(n) for title, n in encoder.sizes(row).items() if title.startswith("tokens"))
        line = f"  {encoder.show(row)}   [{example.where}; {size} tokens{', cut' if row.cut else ''}]"
        print_line(line.replace("\n", "\\n"))


def _lengths(lengths: Sequence[int]) -> list[str]:
    return [f"{n:g}" for n in (min(lengths), np.median(lengths), np.percentile(lengths, 95), max(lengths))]


def _print(*tables: TextTable) -> None:
    for table in tables:
        make_console().print(table)
        print_line()


def _note(text: str) -> None:
    print_line(f"note: {text}", sys.stderr)
