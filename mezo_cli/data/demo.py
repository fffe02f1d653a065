"""Open the embedded demo data: short movie reviews written for this project, or arithmetic problems."""

from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

from mezo_cli.config.schema import TaskConfig
from mezo_cli.data import files
from mezo_cli.data.table import Source, TaskRows, task_rows
from mezo_cli.errors import UserError, join

LABELS = ("negative", "positive")


def open_source(task: TaskConfig) -> Source:
    """Return the embedded train, dev and test rows: arithmetic problems for a task with a prompt and no columns."""
    if task.generate.prompt is not None and not task.columns:
        return _source("arithmetic", lambda path: task_rows(files.read_table([path], task), task))
    spellings = (task.labels, task.files.labels, task.hub.labels)
    if len(task.columns) != 1 or not any(tuple(labels) == LABELS for labels in spellings):
        raise UserError(
            f"data=demo does not fit task '{task.name}': the demo data are movie reviews like SST-2, one sentence "
            f"labelled {join(LABELS)}; use task=sst2 or task=demo-arithmetic, or data=files or data=hub"
        )
    return _source("data", lambda path: _reviews(path, task))


def _source(folder: str, read: Callable[[Path], TaskRows]) -> Source:
    with resources.as_file(resources.files("mezo_cli") / "demo" / folder) as path:
        train, dev, test = (read(Path(path) / f"{split}.jsonl") for split in ("train", "dev", "test"))
    return Source(train, dev, test)


def _reviews(path: Path, task: TaskConfig) -> TaskRows:
    """Read one file. Its column `sentence` becomes the task's only text column."""
    table = files.read_table([path], task)
    columns = [{"sentence": task.columns[0], "label": task.label_column}[name] for name in table.columns]
    return task_rows(replace(table, columns=columns, label_spellings=(LABELS,)), task)
