"""Open the source of a task's rows: the hub, the embedded demo, or `data.dir`, a folder of files or a single file."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import DataConfig, FilesConfig, TaskConfig
from mezo_cli.data import files
from mezo_cli.data.table import Source, Table, TaskRows, has_no_label, label_texts, read_columns, task_rows
from mezo_cli.errors import UserError, did_you_mean, first_line, join
from mezo_cli.hub import hub_url, is_offline, is_reachable, not_cached, progress_bars, warn_of_cache

DEMO_LABELS = ("negative", "positive")


def open_source(task: TaskConfig, data: DataConfig) -> Source:
    """Return the rows of a data source.

    `data.dir` is a folder with train, dev (or validation) and test files, or one file. Without `data.shots`, a test
    file without labels (as GLUE's) is skipped with a note. With `data.shots`, the official dev file of a .tsv task is
    the test set, as in the published code, and the test file is not opened. If the folder has no train file, the task's
    own folder in it (`task.files.folder`) is opened: one `data.dir` serves several tasks.
    """
    if not isinstance(data, FilesConfig):
        return _open_demo(task) if data.name == "demo" else _open_hub(task)
    try:
        train = _train_files(task, data)
        is_file = Path(data.dir or "").expanduser().is_file()
        return Source(_open_rows(train, task)) if is_file else _open_folder(train, task, data)
    except PermissionError as error:
        raise UserError(f"data.dir={data.dir}: {error.filename}: permission denied") from error


def first_rows(task: TaskConfig, data: DataConfig, count: int) -> Table:
    """Return the first rows of train as they are, whatever a task reads of them. Of the hub no more is fetched."""
    if isinstance(data, FilesConfig):
        table = files.read_table(_train_files(task, data), task)
    elif data.name == "hub" and task.hub.path is not None:
        cache_only = is_offline() or not (Path(task.hub.path).is_dir() or is_reachable())
        rows = _load(task, task.hub.train, cache_only, _downloaded(task) if cache_only else None, not cache_only)
        table = files.arrow_table(task.hub.path, task.hub.path, files.of_dataset(rows.take(count)))
    else:
        raise UserError("task=own needs data=files data.dir=PATH, or data=hub task.hub.path=NAME")
    return table.take(range(min(count, len(table.rows))))


def _open_demo(task: TaskConfig) -> Source:
    """Return the embedded rows: short movie reviews, or arithmetic problems for a task with a prompt and no columns."""
    solves = task.generate.prompt is not None and not task.columns
    spellings = (task.labels, *task.lists().values())
    if not solves and (len(task.columns) != 1 or not any({*labels} == {*DEMO_LABELS} for labels in spellings)):
        raise UserError(
            f"data=demo does not fit task '{task.name}': the demo data are movie reviews like SST-2, one sentence "
            f"labelled {join(DEMO_LABELS)}; use task=sst2 or task=demo-arithmetic, or data=files or data=hub"
        )
    with resources.as_file(resources.files("mezo_cli") / "demo" / ("arithmetic" if solves else "data")) as path:
        tables = [files.read_table([Path(path) / f"{split}.jsonl"], task) for split in ("train", "dev", "test")]
    if not solves:  # the column `sentence` becomes the task's only text column
        names = {"sentence": task.columns[0], "label": task.label_column}
        tables = [replace(table, columns=[names[name] for name in table.columns]) for table in tables]
    train, dev, test = (task_rows(table, task) for table in tables)
    return Source(train, dev, test)


def _open_rows(paths: list[Path], task: TaskConfig) -> TaskRows:
    return task_rows(files.read_table(paths, task), task)


def _train_files(task: TaskConfig, data: FilesConfig) -> list[Path]:
    """Return the file `data.dir`, or the training file, or its shards, of that folder or of the task's own in it."""
    if data.dir is None:
        raise UserError("data=files needs data.dir=PATH: a folder with train, dev and test files, or one file")
    root = Path(data.dir).expanduser()
    if root.is_file():
        if root.suffix not in files.SUFFIXES:
            raise UserError(f"{root}: unknown file extension; allowed: {join(files.SUFFIXES)}")
        return [root]
    if not root.exists():
        near = did_you_mean(root.name, [p.name for p in root.parent.iterdir()]) if root.parent.is_dir() else ""
        raise UserError(f"data.dir={data.dir}: no such file or folder{near}; it is relative to {Path.cwd()}")
    if not root.is_dir():
        raise UserError(f"data.dir={data.dir}: this is neither a folder nor a regular file")
    folder = root / task.files.folder if task.files.folder else root
    paths = _find(root, ["train"]) or (_find(folder, ["train"]) if folder.is_dir() else [])
    if not paths:
        folder = folder if folder.is_dir() else root
        there = join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        wanted = join(f"train{suffix}" for suffix in files.SUFFIXES)
        raise UserError(f"{folder}: no training file ({wanted}); there is: {there}")
    return paths


def _open_folder(train_paths: list[Path], task: TaskConfig, data: FilesConfig) -> Source:
    folder, stem = train_paths[0].parent, task.files.dev
    dev_stems = [stem, stem.replace("dev", "validation"), "dev", "validation", "valid", "val"]
    dev_paths = _find(folder, list(dict.fromkeys(dev_stems)))
    test_paths = _find(folder, list(dict.fromkeys([task.files.test, "test"])))
    train = _open_rows(train_paths, task)
    dev = _open_rows(dev_paths, task) if dev_paths else None
    notes: list[str] = []
    if dev is not None and data.shots is not None and dev.table.suffix == ".tsv":
        if test_paths:
            notes.append(
                f"{test_paths[0].name} is not used: with data.shots the test set is the official {dev.table.name}"
            )
        return Source(train, dev, None, notes)
    test = _open_test(test_paths, task, notes) if test_paths else None
    return Source(train, dev, test, notes)


def open_other_tests(task: TaskConfig, official: TaskRows) -> dict[str, TaskRows]:
    """Return the other test sets in the folder of the official one: `dev_mismatched.tsv` for `dev_matched.tsv`.

    The keys are what follows `dev_` or `test_` in the file names.
    """
    path = Path(official.table.path)
    start = path.stem.partition("_")[0] + "_"
    if not path.is_file() or not path.stem.startswith(start):
        return {}
    others = [p for p in sorted(path.parent.glob(f"{start}*{path.suffix}")) if p != path]
    return {p.stem.removeprefix(start): _open_rows([p], task) for p in others}


def _open_test(paths: list[Path], task: TaskConfig, notes: list[str]) -> TaskRows | None:
    """Return the rows of a test file; None, with a note, if it has no labels, or not what a task without them reads."""
    table = files.read_table(paths, task)
    needed = [task.label_column] if task.labels else read_columns(task)
    missing = [name for name in needed if table.find_column(name, task.rename) is None]
    if missing:
        why = ": without labels it is" if task.labels else f", which task '{task.name}' reads: it is"
        notes.append(f"{table.name} has no column '{missing[0]}'{why} no test set")
        return None
    if task.labels and table.rows:
        (column,) = table.find_columns(needed, task)
        values = sorted(set(label_texts(table, column)))
        if all(has_no_label(value, task) for value in values):
            shown = " or ".join(value or "''" for value in values)
            notes.append(f"{table.name} has the label {shown} in every row: without labels it is no test set")
            return None
    return task_rows(table, task)


def _find(folder: Path, stems: list[str]) -> list[Path]:
    """Return the file with one of the stems, or all shards of one (`train-00000-of-00002.parquet`)."""
    candidates = [p for stem in stems for suffix in files.SUFFIXES if os.path.lexists(p := folder / f"{stem}{suffix}")]
    paths = [p for p in candidates if p.is_file()]
    if candidates and not paths:
        path = candidates[0]
        what = "a folder" if path.is_dir() else "a link that leads nowhere" if path.is_symlink() else "no file"
        raise UserError(f"{path}: this is {what}; a file is needed")
    if len(paths) > 1:
        raise UserError(f"{folder}: {join(p.name for p in paths)}: only one of these may be there; remove the others")
    for stem in [] if paths else stems:
        found = (re.fullmatch(re.escape(stem) + r"-(\d+)-of-(\d+)\.parquet", p.name) for p in sorted(folder.iterdir()))
        shards = [match for match in found if match]
        if shards and len(shards) != int(shards[0][2]):
            raise UserError(f"{folder}: {len(shards)} of the {int(shards[0][2])} shards of {stem} are there")
        paths += [folder / match[0] for match in shards]
    return paths


# --- the hub, a server with its interface (HF_ENDPOINT), or the local cache ---


def _open_hub(task: TaskConfig) -> Source:
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
    rows = {}
    for split, dataset in loaded.items():
        name = "/".join(part for part in (hub.path, hub.name, split) if part)
        table = files.arrow_table(name, f"hub data set {name}", files.of_dataset(dataset), spelled_as=("hub",))
        rows[split] = task_rows(table, task)
    return Source(rows[hub.train], rows.get(hub.dev or ""), rows.get(hub.test or ""), revision=revision)


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


def _load(task: TaskConfig, split: str, cache_only: bool, downloaded: Path | None, streaming: bool = False) -> Any:
    import datasets  # slow to import, and needed here only

    hub = task.hub
    assert hub.path is not None
    try:
        with progress_bars(datasets), _offline_mode(datasets) if cache_only else nullcontext():
            try:
                return datasets.load_dataset(
                    hub.path, hub.name, split=split, revision=hub.revision, streaming=streaming
                )
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
