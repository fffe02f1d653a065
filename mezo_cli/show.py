"""What the doors print besides runs: the list of runs, the data as the model sees it, the environment."""

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from mezo_cli import config as configs
from mezo_cli import machine, terminal
from mezo_cli import runs as run_dirs
from mezo_cli.errors import UserError
from mezo_cli.schema import Config, Splits

console = terminal.make_console()
NUMBERS = ("seed", "step", "dev", "test")


def runs(folder: Path) -> None:
    """List the runs under `folder`: status, what was run, how it ended; what ails the failed ones below."""
    found = run_dirs.find(folder)
    if not found:
        print(f"no runs under {folder}")
        return
    table, ailing = terminal.table("run", "status", "task", "objective", "method", "model", *NUMBERS), []
    for column in table.columns[1 : -len(NUMBERS)]:
        column.justify = "left"
    for run in found:
        where = os.path.relpath(run.path, folder)
        try:
            table.add_row(where, *_row(run))
            info = run.info()
            if info["status"] == "failed":
                ailing.append(f"{where}: {info.get('error')}")
        except UserError as error:
            table.add_row(where, "damaged")
            ailing.append(f"{where}: {error}")
    console.print(table, markup=False, highlight=False)
    for line in ailing:
        print(" ".join(line.split()))


def _row(run: run_dirs.Run) -> list[str]:
    """Return the cells of a run, percentages for the best dev and the test accuracy."""
    status = run.status()
    config, lines = configs.read(run.path / "config.yaml"), run.metrics()
    dev = max((m["accuracy"] for m in lines if m.get("split") == "dev"), default=None)
    test = next((m["accuracy"] for m in reversed(lines) if m.get("split") == "test"), None)
    step = max((m["step"] for m in lines), default=0)
    percent = ["-" if value is None else f"{100 * value:.1f}" for value in (dev, test)]
    loss = config.objective.loss
    objective = config.objective.name if loss == "cross_entropy" else f"{config.objective.name} {loss}"
    method = " ".join(name for name in (config.optimizer.name, config.peft.name) if name != "none")
    names = [config.task.name, objective, method, Path(config.model.path).name]
    return [status, *names, str(config.seed), f"{step}/{config.steps}", *percent]


def data(overrides: Sequence[str], export: Path | None, config_dir: str | None) -> None:
    """Show the splits and a few prompts, or write the few-shot files; writing loads no tokenizer and no model."""
    from mezo_cli import data as sources

    configs.check(overrides, config_dir)
    config = configs.build(overrides, config_dir)
    seed = config.data.seed if config.data.seed is not None else config.seed
    if export is not None:
        for path in sources.export(config.task, config.data, seed, export, warn=_warn):
            print(f"wrote {path}")
        return
    splits = sources.load(config.task, config.data, seed)
    for note in splits.notes:
        _warn(note)
    for table in _tables(sources.describe(splits, config.task)):
        console.print(table)
        print()
    _prompts(config, splits)


def _warn(note: str) -> None:
    print(f"warning: {note}", file=sys.stderr)


def _tables(facts: dict[str, dict]) -> list[Table]:
    splits = {name: fact for name, fact in facts.items() if fact is not None}
    tables = []
    for title, kind in (("rows per label", "labels"), ("words per row", "words")):
        table = terminal.table(title, *next(iter(splits.values()))[kind])
        for name, fact in splits.items():
            table.add_row(f"  {name}", *(f"{n:g}" for n in fact[kind].values()))
        tables.append(table)
    return tables


def _prompts(config: Config, splits: Splits) -> None:
    """Print one prompt a label, decoded from its tokens."""
    from mezo_cli import models
    from mezo_cli.tasks import INPUTS

    tokenizer = models.load_tokenizer(config.model, config.objective.name)
    inputs = INPUTS[config.objective.name](config.task, tokenizer)
    print("prompts, as the model sees them:")
    for index, label in enumerate(config.task.labels):
        row = next((row for row in splits.train if row.label == index), None)
        if row is None:
            continue
        encoded = inputs.encode(row)
        word = f" -> '{inputs.words[index]}'" if inputs.words else ""
        print(f"  {inputs.show(encoded)}   [{label}{word}; {len(encoded.ids)} tokens]")


def env() -> None:
    """Print what a bug report needs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts = {
        **machine.versions(),
        "platform": platform.platform(),
        "cores": f"{os.cpu_count()}, torch threads {torch.get_num_threads()}",
        "cuda": ", ".join(gpus) or "none",
        "HF_ENDPOINT": os.environ.get("HF_ENDPOINT", "not set"),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "not set"),
        "commit": machine.git_commit() or "not a checkout",
    }
    for name, value in facts.items():
        print(f"{name:14} {value}")
