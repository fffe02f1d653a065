"""Rows from the Hugging Face hub (or a hub-like server named by HF_ENDPOINT), or from its local cache."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mezo_cli.data.files import class_name, from_records
from mezo_cli.data.source import Source
from mezo_cli.data.table import Rows, bind
from mezo_cli.errors import UserError
from mezo_cli.schema import TaskConfig


def open_source(task: TaskConfig) -> Source:
    """Load the splits that `task.hub` names; ClassLabel integers become their names at once.

    Raises `UserError` when the data set cannot be had, with what was looked for and how to run without it.
    """
    hub = task.hub
    if hub.path is None:
        raise UserError(f"task '{task.name}' has no data set on the hub (task.hub.path); use data=files data.dir=PATH")
    train = _rows(task, hub.train)
    dev = _rows(task, hub.dev) if hub.dev else None
    return Source(train, dev, _rows(task, hub.test) if hub.test else None)


def _rows(task: TaskConfig, split: str) -> Rows:
    dataset = _load(task, split)
    wanted = {*task.columns, task.label_column}
    keep = [name for name in dataset.column_names if name in wanted or task.rename.get(name) in wanted]
    columns = keep or list(dataset.column_names)  # none: let bind say what is missing
    if set(keep) != wanted:
        columns = list(dataset.column_names)
    batch = dataset.select_columns(columns).with_format(None)[:]
    values = []
    for column in columns:
        names = getattr(dataset.features[column], "names", None)
        values.append([class_name(value, names) for value in batch[column]] if names else batch[column])
    name = "/".join(part for part in (task.hub.path, task.hub.name, split) if part)
    rows = list(zip(*values, strict=True))
    return bind(from_records(name, f"hub data set {name}", columns, rows, (tuple(task.hub.labels),)), task)


def _load(task: TaskConfig, split: str) -> Any:
    """Call `datasets.load_dataset`; every failure of it is one of the surroundings, told in one line."""
    import datasets  # heavy, and needed for this source only

    hub = task.hub
    assert hub.path is not None
    try:
        with _quiet(datasets):
            return datasets.load_dataset(hub.path, hub.name, split=split, revision=hub.revision)
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        what = hub.path + (f" ({hub.name})" if hub.name else "") + (f" at {hub.revision}" if hub.revision else "")
        raise UserError(
            f"data=hub: cannot load data set {what}, split {split}, from {endpoint}: {type(error).__name__}: {reason}; "
            "to run offline: experiment=demo, or data=files data.dir=PATH"
        ) from error


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No progress bars where nobody watches."""
    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
