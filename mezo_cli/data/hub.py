"""Load rows from the Hugging Face hub, a server with its interface (HF_ENDPOINT), or the local cache."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import TaskConfig
from mezo_cli.console import is_live
from mezo_cli.data.files import arrow_table
from mezo_cli.data.table import Source, TaskRows, task_rows
from mezo_cli.errors import UserError, first_line
from mezo_cli.hub import hub_url, is_offline, is_reachable, not_cached, progress_bars, warn_of_cache


def open_source(task: TaskConfig) -> Source:
    """Return the splits that `task.hub` names. ClassLabel integers are replaced by their names."""
    hub = task.hub
    if hub.path is None:
        raise UserError(f"task '{task.name}' has no data set on the hub (task.hub.path); use data=files data.dir=PATH")
    cache_only = is_offline() or not (Path(hub.path).is_dir() or is_reachable())
    downloaded = _downloaded(task) if cache_only else None
    loaded = {split: _load(task, split, cache_only, downloaded) for split in (hub.train, hub.dev, hub.test) if split}
    folders = [Path(file["filename"]).parent for file in loaded[hub.train].cache_files] + [downloaded or Path()]
    commits = (folder.name for folder in folders if re.fullmatch("[0-9a-f]{40}", folder.name))  # it names its folder
    revision = next(commits, None)
    if cache_only:
        warn_of_cache(f"data set {hub.path}", revision)
    rows = {split: _rows(task, split, dataset) for split, dataset in loaded.items()}
    return Source(rows[hub.train], rows.get(hub.dev or ""), rows.get(hub.test or ""), revision=revision)


def _rows(task: TaskConfig, split: str, dataset: Any) -> TaskRows:
    name = "/".join(part for part in (task.hub.path, task.hub.name, split) if part)
    table = dataset.with_format("arrow")[:].replace_schema_metadata(dataset.features.arrow_schema.metadata)
    return task_rows(arrow_table(name, f"hub data set {name}", table, spelled_as=("hub",)), task)


def _downloaded(task: TaskConfig) -> Path | None:
    """Return the folder of a data set in the hub's local cache, as `hf download` makes it; None if it is not there."""
    import huggingface_hub

    name, revision = str(task.hub.path), task.hub.revision
    try:
        return Path(
            huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True)
        )
    except (OSError, ValueError):  # a folder's name is no name of a repository
        return None


def _load(task: TaskConfig, split: str, cache_only: bool, downloaded: Path | None) -> Any:
    """Call `datasets.load_dataset`, and raise a `UserError` of one line for any failure of it."""
    import datasets  # slow to import, and needed here only

    hub = task.hub
    assert hub.path is not None
    try:
        with progress_bars(datasets, is_live(sys.stderr)), _offline_mode(datasets) if cache_only else nullcontext():
            try:
                return datasets.load_dataset(hub.path, hub.name, split=split, revision=hub.revision)
            except OSError:  # it is not in the cache of `datasets`
                if downloaded is None:
                    raise
                return datasets.load_dataset(str(downloaded), hub.name, split=split)
    except Exception as error:  # exceptions of datasets, huggingface_hub, httpx and pyarrow
        reason = f"{type(error).__name__}: {first_line(error)}"
        if cache_only and isinstance(error, OSError):  # ConnectionError, FileNotFoundError
            reason = not_cached(hub.path, hub.path, hub.revision, "--repo-type dataset ")
        what = hub.path + (f" ({hub.name})" if hub.name else "") + (f" at {hub.revision}" if hub.revision else "")
        raise UserError(
            f"data=hub: cannot load data set {what}, split {split}, from {hub_url()}: {reason}; "
            "to run offline: experiment=demo, or data=files data.dir=PATH"
        ) from error


@contextmanager
def _offline_mode(datasets: Any) -> Iterator[None]:
    """Set the libraries' offline switches, for a server that does not answer.

    Without them the libraries retry for half a minute, with many warnings, before they use the cache.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
