"""Rows from the Hugging Face hub (or a hub-like server named by HF_ENDPOINT), or from its local cache."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mezo_cli import endpoint
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
    test = _rows(task, hub.test) if hub.test else None
    return Source(train, dev, test)


def _rows(task: TaskConfig, split: str) -> Rows:
    dataset = _load(task, split)
    columns = list(dataset.column_names)
    batch = dataset.with_format(None)[:]
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
    cache_only = endpoint.switched_off() or not (Path(hub.path).is_dir() or endpoint.answers())
    try:
        with _quiet(datasets), _switched_offline(datasets) if cache_only else nullcontext():
            return datasets.load_dataset(hub.path, hub.name, split=split, revision=hub.revision)
    except Exception as error:  # the families of datasets, huggingface_hub, httpx and pyarrow all arrive here
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        if cache_only and isinstance(error, OSError):  # ConnectionError, FileNotFoundError
            reason = "HF_HUB_OFFLINE is set" if endpoint.switched_off() else "the server does not answer"
            reason += ", and the cache does not have it"
        what = hub.path + (f" ({hub.name})" if hub.name else "") + (f" at {hub.revision}" if hub.revision else "")
        raise UserError(
            f"data=hub: cannot load data set {what}, split {split}, from {endpoint.address()}: {reason}; "
            "to run offline: experiment=demo, or data=files data.dir=PATH"
        ) from error


@contextmanager
def _switched_offline(datasets: Any) -> Iterator[None]:
    """Set the libraries' own offline switches, for a server that does not answer.

    Without this they try again for half a minute, with a page of warnings, before they turn to the cache.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


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
