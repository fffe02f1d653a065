"""Open the embedded demo data: short movie reviews written for this project, or arithmetic problems."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

from mezo_cli.config.schema import TaskConfig
from mezo_cli.data import files
from mezo_cli.data.table import Source, task_rows
from mezo_cli.errors import UserError, join

LABELS = ("negative", "positive")


def open_source(task: TaskConfig) -> Source:
    """Return the embedded train, dev and test rows: arithmetic problems for a task with a prompt and no columns."""
    solves = task.generate.prompt is not None and not task.columns
    spellings = (task.labels, task.files.labels, task.hub.labels)
    if not solves and (len(task.columns) != 1 or not any(tuple(labels) == LABELS for labels in spellings)):
        raise UserError(
            f"data=demo does not fit task '{task.name}': the demo data are movie reviews like SST-2, one sentence "
            f"labelled {join(LABELS)}; use task=sst2 or task=demo-arithmetic, or data=files or data=hub"
        )
    with resources.as_file(resources.files("mezo_cli") / "demo" / ("arithmetic" if solves else "data")) as path:
        tables = [files.read_table([Path(path) / f"{split}.jsonl"], task) for split in ("train", "dev", "test")]
    if not solves:  # the column `sentence` becomes the task's only text column
        names = {"sentence": task.columns[0], "label": task.label_column}
        columns = [names[name] for name in tables[0].columns]
        tables = [replace(table, columns=columns, label_spellings=(LABELS,)) for table in tables]
    train, dev, test = (task_rows(table, task) for table in tables)
    return Source(train, dev, test)
