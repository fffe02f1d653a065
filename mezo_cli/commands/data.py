"""`mezo data`: show the data as the model sees it, or write the few-shot splits."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, Splits
from mezo_cli.console import TextTable, make_console, make_table, print_line
from mezo_cli.system import import_torch


def data(overrides: Sequence[str], export: Path | None, config_dir: str | None) -> None:
    """Show the splits and a few prompts, or write the few-shot files; writing loads no tokenizer and no model."""
    from mezo_cli import data as sources

    config = build_config(overrides, config_dir)
    if export is not None:
        for path in sources.export(config.task, config.data, config.data_seed, export, warn=_warn):
            print_line(f"wrote {path}")
        return
    splits = sources.load(config.task, config.data, config.data_seed)
    for note in splits.notes:
        _warn(note)
    for table in _tables(sources.describe(splits, config.task)):
        make_console().print(table)
        print_line()
    _prompts(config, splits)


def _warn(note: str) -> None:
    print_line(f"warning: {note}", sys.stderr)


def _tables(described: dict[str, Any]) -> list[TextTable]:
    splits = {name: one for name, one in described.items() if one is not None}
    tables = []
    for title, figure in (("rows per label", "labels"), ("words per row", "words")):
        table = make_table(title, *next(iter(splits.values()))[figure])
        for name, one in splits.items():
            table.add_row(f"  {name}", *(f"{n:g}" for n in one[figure].values()))
        tables.append(table)
    return tables


def _prompts(config: Config, splits: Splits) -> None:
    """Print one prompt per label, decoded from its tokens."""
    import_torch()
    from mezo_cli import models
    from mezo_cli.objectives import OBJECTIVES

    objective = OBJECTIVES.load(config.objective.name)
    encoder = objective.encoder_class(config.task, models.load_tokenizer(config.model, objective.model_kind))
    print_line("prompts, as the model sees them:")
    for index, label in enumerate(config.task.labels):
        row = next((row for row in splits.train if row.label == index), None)
        if row is None:
            continue
        encoded = encoder.encode(row)
        word = f" -> '{encoder.label_words[index]}'" if encoder.label_words else ""
        print_line(f"  {encoder.decode(encoded)}   [{label}{word}; {len(encoded.input_ids)} tokens]")
