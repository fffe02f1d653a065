"""What the doors print besides runs: the list of runs, the data as the model sees it, the environment."""

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mezo_cli import config as configs
from mezo_cli import runs as run_dirs
from mezo_cli.errors import UserError
from mezo_cli.schema import Config, Splits

console = Console()


def runs(folder: Path) -> None:
    """List the runs under `folder`: status, what was run, how it ended."""
    found = run_dirs.find(folder)
    if not found:
        console.print(f"no runs under {folder}")
        return
    table = Table()
    for column in ("run", "status", "task", "objective", "optimizer", "model", "seed", "step", "dev", "test"):
        table.add_column(
            column, justify="right" if column in ("seed", "step", "dev", "test") else "left", overflow="fold"
        )
    for run in found:
        try:
            table.add_row(*_row(run, folder))
        except UserError as error:
            table.add_row(os.path.relpath(run.path, folder), f"[red]damaged[/]: {error}")
    console.print(table)


def _row(run: run_dirs.Run, folder: Path) -> list[str]:
    config = configs.read(run.path / "config.yaml")
    dev = max((m["accuracy"] for m in run.evaluations("dev")), default=None)
    test = next((m["accuracy"] for m in reversed(run.evaluations("test"))), None)
    step = max((m["step"] for m in run.metrics()), default=0)
    status = run.status()
    if status == "failed":
        status = f"failed: {(run.info().get('error') or '')[:80]}"
    percent = ["-" if value is None else f"{100 * value:.1f}" for value in (dev, test)]
    names = [config.task.name, f"{config.objective.name} {config.objective.loss}", config.optimizer.name]
    where = os.path.relpath(run.path, folder)
    return [where, status, *names, config.model.name, str(config.seed), f"{step}/{config.steps}", *percent]


def data(overrides: Sequence[str], export: Path | None, config_dir: str | None) -> None:
    """Show the splits and a few prompts, or write the few-shot files; writing loads no tokenizer and no model."""
    from mezo_cli import data as sources

    configs.check(overrides, config_dir)
    config = configs.build(overrides, config_dir)
    seed = config.data.seed if config.data.seed is not None else config.seed
    if export is not None:
        for path in sources.export(config.task, config.data, seed, export):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        return
    splits = sources.load(config.task, config.data, seed)
    for note in splits.notes:
        print(f"warning: {note}", file=sys.stderr)
    for table in _tables(sources.describe(splits, config.task)):
        console.print(table)
    _prompts(config, splits)


def _tables(facts: dict[str, dict]) -> list[Table]:
    names = [name for name, fact in facts.items() if fact is not None]
    balance, lengths = Table(title="rows per label", title_justify="left"), Table(title="words", title_justify="left")
    balance.add_column("split")
    lengths.add_column("split")
    for label in facts[names[0]]["labels"]:
        balance.add_column(label, justify="right")
    for column in facts[names[0]]["words"]:
        lengths.add_column(column, justify="right")
    for name in names:
        balance.add_row(name, *(str(n) for n in facts[name]["labels"].values()))
        lengths.add_row(name, *(f"{n:g}" for n in facts[name]["words"].values()))
    return [balance, lengths]


def _prompts(config: Config, splits: Splits) -> None:
    """Print one prompt a label, decoded from its tokens."""
    from mezo_cli import models
    from mezo_cli.tasks import PlainInput, Prompt

    tokenizer = models.load_tokenizer(config.model)
    inputs = (Prompt if config.objective.name == "mlm" else PlainInput)(config.task, tokenizer)
    console.print("prompts, as the model sees them:", highlight=False)
    for index, label in enumerate(config.task.labels):
        row = next((row for row in splits.train if row.label == index), None)
        if row is None:
            continue
        encoded = inputs.encode(row)
        word = f" -> '{config.task.label_words[index]}'" if config.objective.name == "mlm" else ""
        text = f"  {inputs.show(encoded)}   [{label}{word}; {len(encoded.ids)} tokens]"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def env() -> None:
    """Print what a bug report needs."""
    import torch

    for name, version in run_dirs.versions().items():
        console.print(f"{name:14} {version}", highlight=False)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    console.print(f"{'platform':14} {platform.platform()}", highlight=False)
    console.print(f"{'cores':14} {os.cpu_count()}, torch threads {torch.get_num_threads()}", highlight=False)
    console.print(f"{'cuda':14} {', '.join(gpus) or 'none'}", highlight=False)
    console.print(f"{'HF_ENDPOINT':14} {os.environ.get('HF_ENDPOINT', 'not set')}", highlight=False)
