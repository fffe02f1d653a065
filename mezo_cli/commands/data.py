"""`mezo data`: show the data as the model sees it, or write the splits that are drawn."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.commands.execute import load_encoder
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Splits
from mezo_cli.console import TextTable, make_console, make_table, print_line

if TYPE_CHECKING:
    from mezo_cli.tasks import ClassificationEncoder, InputEncoder

SHOWN = 3  # rows with prompt and answer


def data(overrides: Sequence[str], export: Path | None, config_dir: str | None) -> None:
    """Show the splits and a few prompts, or write the files of the splits; writing loads no tokenizer and no model."""
    from mezo_cli import data as sources

    config = build_config(overrides, config_dir)
    if export is not None:
        for path in sources.export(config.data_task, config.data, config.data_seed, export, warn=_note):
            print_line(f"wrote {path}")
        return
    splits = sources.load(config.data_task, config.data, config.data_seed)
    for note in splits.notes:
        _note(note)
    if not config.objective.needs_labels:
        _show_rows(load_encoder(config), splits)
        return
    _print(_tables(sources.describe(splits, config.task)))
    _print_prompts(load_encoder(config), splits)


def _print(tables: Sequence[TextTable]) -> None:
    for table in tables:
        make_console().print(table)
        print_line()


def _tables(described: dict[str, Any]) -> list[TextTable]:
    tables = []
    for title, figure in (("rows per label", "labels"), ("words per row", "words")):
        table = make_table(title, *described["train"][figure])
        for name, one in described.items():
            table.add_row(f"  {name}", *(f"{n:g}" for n in one[figure].values()))
        tables.append(table)
    return tables


def _print_prompts(encoder: "ClassificationEncoder", splits: Splits) -> None:
    """Print one prompt per label, decoded from its tokens."""
    print_line("prompts, as the model sees them:")
    for index, label in enumerate(encoder.task.labels):
        row = next((row for row in splits.train if row.label == index), None)
        if row is None:
            continue
        encoded = encoder.encode(row)
        word = f" -> '{encoder.label_words[index]}'" if encoder.label_words else ""
        print_line(f"  {encoder.decode(encoded)}   [{label}{word}; {len(encoded.input_ids)} tokens]")


def _show_rows(encoder: "InputEncoder[Any]", splits: Splits) -> None:
    """Print the sizes of rows that have no labels to count, and the first rows of train, decoded from their tokens."""
    from mezo_cli.data import describe_lengths

    examples = {"train": splits.train, "dev": splits.dev, "test": splits.test}
    rows = {name: encoder.encode_all(some) for name, some in examples.items() if some}
    titles = list(encoder.sizes(rows["train"][0]))
    tables = [
        make_table(title, "min", "median", "p95", "max", *("rows", "cut")[: 2 * (not i)])
        for i, title in enumerate(titles)
    ]
    for name, some in rows.items():
        sizes = [encoder.sizes(row) for row in some]
        for title, table in zip(titles, tables, strict=True):
            lengths = describe_lengths([of_row[title] for of_row in sizes])
            counts = (len(some), sum(row.cut for row in some)) if table is tables[0] else ()
            table.add_row(f"  {name}", *(f"{n:g}" for n in [*lengths.values(), *counts]))
    _print(tables)
    print_line("prompts and what follows them, as the model sees them:")
    for example, row in zip(splits.train[:SHOWN], rows["train"], strict=False):
        size = " + ".join(str(n) for title, n in encoder.sizes(row).items() if title.startswith("tokens"))
        line = f"  {encoder.show(row)}   [{example.where}; {size} tokens{', cut' if row.cut else ''}]"
        print_line(line.replace("\n", "\\n"))


def _note(text: str) -> None:
    print_line(f"note: {text}", sys.stderr)
