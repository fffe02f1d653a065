"""The embedded demo data: short movie opinions written for this project."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

from mezo_cli.data import files
from mezo_cli.data.source import Source
from mezo_cli.data.table import Rows, bind
from mezo_cli.errors import UserError, listed
from mezo_cli.schema import TaskConfig

LABELS = ("negative", "positive")


def open_source(task: TaskConfig) -> Source:
    """Open the embedded train, dev and test rows. Raises `UserError` for a task that they do not fit."""
    spellings = (task.labels, task.files.labels, task.hub.labels)
    if len(task.columns) != 1 or not any(tuple(labels) == LABELS for labels in spellings):
        raise UserError(
            f"data=demo does not fit task '{task.name}': the demo data are movie opinions like SST-2, one sentence "
            f"labelled {listed(LABELS)}; use task=sst2, or data=files or data=hub"
        )
    with resources.as_file(resources.files("mezo_cli") / "demo" / "data") as folder:
        train, dev, test = (_rows(Path(folder) / f"{split}.jsonl", task) for split in ("train", "dev", "test"))
    return Source(train, dev, test)


def _rows(path: Path, task: TaskConfig) -> Rows:
    """Read one file; its column `sentence` stands for the task's only one, whatever that is called."""
    table = files.read([path], task)
    columns = [{"sentence": task.columns[0], "label": task.label_column}[name] for name in table.columns]
    return bind(replace(table, columns=columns, extra_labels=(LABELS,)), task)
